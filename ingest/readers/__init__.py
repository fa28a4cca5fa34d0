"""Readers: the text of formats that are more than text."""
