"""How ranks talk: every collective the house calls, counted."""
