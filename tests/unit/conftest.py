"""Fixtures that several test files use."""

from repositories import repository

__all__ = ["repository"]
