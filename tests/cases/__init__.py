"""Faults that attention operators have had, each as a test of its right value or refusal. catalogue.py lists them."""
