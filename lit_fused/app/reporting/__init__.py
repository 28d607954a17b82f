"""Report a run or a sweep: results in a table, a picture and a page."""
