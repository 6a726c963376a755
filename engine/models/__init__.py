"""Forward passes, written once over the operations of a device."""
