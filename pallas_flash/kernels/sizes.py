"""Numbers of rows and columns that the kernels work in. Importing this module does not import Pallas."""

from __future__ import annotations

from pallas_flash.spec import Shapes

ROWS, COLUMNS = 8, 16  # buffers hold matrices in units of this many rows and columns
ROW_UNIT = 8  # asynchronous copies move 16 bytes of a row, or more; other head dims cost a padded copy
EVERY_ITEM = 2**31 - 1  # CTAs: one for each work item, and the hardware gives an SM the next when it has room


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def padded_head_dims(shapes: Shapes, unit: int = COLUMNS) -> tuple[int, int]:
    return round_up(shapes.head_dim, unit), round_up(shapes.value_head_dim, unit)
