"""Commands around the three processes: start, test, measure, replay."""
