"""This package's attention inside other libraries; nothing here is imported by the package."""
