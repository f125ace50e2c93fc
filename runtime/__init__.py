"""Flat distributed buffers, collectives and streams. Imported as compile_fsdp.runtime."""
