"""Picture documents: pictures drawn here by a seed, with text about them that is true because it was there first."""
