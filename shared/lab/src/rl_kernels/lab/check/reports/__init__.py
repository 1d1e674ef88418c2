"""The formats of a report: text, strict JSON, JUnit XML, one HTML page."""
