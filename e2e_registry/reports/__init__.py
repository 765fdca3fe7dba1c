"""Renders what operations concluded, for people and for machines; decides nothing."""
