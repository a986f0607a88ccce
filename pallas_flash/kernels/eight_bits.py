"""8-bit numbers to 16 bits in registers, two at a time, exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_INSTRUCTIONS = {
    # The byte in the mantissa of 128. Its top bit falls on the exponent's last: 256 there, else 128, is subtracted.
    ("int8", "bfloat16"): (
        ".reg .b32 s, t; prmt.b32 s, $1, $2, {selector}; and.b32 t, s, 0xff80ff80; and.b32 s, s, 0xff7fff7f; "
        "sub.bf16x2 $0, s, t;"
    ),
    # byte + 128 in the mantissa of 1024, less 1152.
    ("int8", "float16"): (
        ".reg .b32 s, t; xor.b32 s, $1, 0x80808080; prmt.b32 s, s, $2, {selector}; mov.b32 t, 0x64806480; "
        "sub.f16x2 $0, s, t;"
    ),
    ("float8_e4m3fn", "float16"): (
        ".reg .b16 l, h; .reg .b32 s; prmt.b32 s, $1, $2, {bytes}; mov.b32 {{l, h}}, s; cvt.rn.f16x2.e4m3x2 $0, l;"
    ),
    ("float8_e4m3fn", "bfloat16"): (
        ".reg .b16 l, h; .reg .b32 s; .reg .f32 x, y; prmt.b32 s, $1, $2, {bytes}; mov.b32 {{l, h}}, s; "
        "cvt.rn.f16x2.e4m3x2 s, l; mov.b32 {{l, h}}, s; cvt.f32.f16 x, l; cvt.f32.f16 y, h; "
        "cvt.rn.bf16x2.f32 $0, y, x;"
    ),
}
_TYPES = {"bfloat16": "bf16", "float16": "f16"}


_HIGH_BYTES = {("int8", "bfloat16"): 0x43, ("int8", "float16"): 0x64}


class Convert(NamedTuple):
    source: str
    target: str

    @property
    def has_junk(self) -> bool:
        return self.source != "int8"

    @property
    def _kind(self) -> str:
        return f"{_TYPES[self.target]}x2"

    def high_byte(self) -> Any:
        """For `pair`. The compiler must not know it: of two constants it would load one into a register each time. Here
        it is computed from a mask that has one bit set."""
        value = _HIGH_BYTES.get((self.source, self.target), 0)
        return _emit(f"{{ .reg .b32 m; mov.u32 m, %lanemask_eq; popc.b32 m, m; add.u32 $0, m, {value - 1}; }}")

    def pair(self, word: Any, high_byte: Any, low: int, high: int) -> Any:
        """Two bytes of a word of four, as a word of two numbers."""
        text = _INSTRUCTIONS[self.source, self.target]
        return _emit(f"{{ {text.format(selector=f'0x4{high}4{low}', bytes=f'0x44{high}{low}')} }}", word, high_byte)

    def is_junk(self, pair: Any) -> Any:
        """1 for what is NaN, else 0: float8_e4m3fn has no infinity."""
        return _emit(f"set.nan.{self._kind}.{self._kind} $0, $1, $1;", pair)

    def finite(self, pair: Any) -> Any:
        """Some number for what is NaN: the minimum of NaN and a number is that."""
        text = f".reg .b32 t; mov.b32 t, 0; max.{self._kind} t, $1, t; min.{self._kind} $0, $1, t;"
        return _emit(f"{{ {text} }}", pair)


def where_one(pair: Any) -> Any:
    """All bits of a half of the word where bfloat16 1 stands, none where 0 does."""
    text = ".reg .b32 t; and.b32 t, $1, 0x00800080; shr.u32 t, t, 7; mul.lo.u32 $0, t, 0xffff;"
    return _emit(f"{{ {text} }}", pair)


def convert(source: Any, target: Any) -> Convert:
    return Convert(np.dtype(source).name, np.dtype(target).name)


def _emit(text: str, *words: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, list(words), text, ",".join(["=r", *["r"] * len(words)]))
