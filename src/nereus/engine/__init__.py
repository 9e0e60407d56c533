"""Processes, groups, memory and bytes: carries out commands and knows no architecture."""
