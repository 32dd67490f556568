"""Checks that return reports, one a file; the public names are those of `stiefel.diagnostics`."""
