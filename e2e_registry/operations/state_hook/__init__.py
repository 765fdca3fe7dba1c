"""The folder that ``doctor`` puts on ``PYTHONPATH`` of a run that it observes; nothing here is imported by name."""
