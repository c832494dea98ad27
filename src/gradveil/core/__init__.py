"""What every stage stands on."""
