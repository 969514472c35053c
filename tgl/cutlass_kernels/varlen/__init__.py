"""Groups of rows of any length inside one tensor."""
