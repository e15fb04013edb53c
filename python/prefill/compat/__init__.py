"""This package's functions under the names of other packages; nothing here is imported by it."""
