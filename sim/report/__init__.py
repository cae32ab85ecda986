"""Pages and timelines: `report.html` of a run or a sweep, trace events for Perfetto, pages of calibrations and measured runs.

Read `html` first.
"""
