"""The emulator against a real device: single instructions, and launches captured in the emulator and replayed."""
