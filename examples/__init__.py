"""Programs that use tgl."""
