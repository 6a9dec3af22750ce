"""Conformance vectors as package data (installed as refimpl.golden); golden/README.md describes them."""
