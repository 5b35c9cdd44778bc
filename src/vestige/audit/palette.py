"""Colours that survive print and colour blindness: those of Okabe and Ito (2008) without yellow.

They are those of the reports' style file, lab/templates/report.mplstyle.
"""

from __future__ import annotations

INK, MUTED, GRID, PAPER = "#1d2530", "#5c6773", "#e3e7ec", "#ffffff"
SHADE = "#f0f4f8"

# blue, vermillion, bluish green, reddish purple, orange, sky blue
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
