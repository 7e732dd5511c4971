"""Readers of files and text under random damage: each answers rightly or refuses in one line."""
