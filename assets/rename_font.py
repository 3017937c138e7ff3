"""Gives a font other names inside (see README.md): source, target, family, style."""

import sys
from fontTools.ttLib import TTFont
source, target, family, style = sys.argv[1:5]
font = TTFont(source, recalcTimestamp=False)
name = font["name"]
postscript = family.replace(" ", "") + "-" + style
full = family if style == "Book" else f"{family} {style}"
for record in list(name.names):
    new = {1: family, 2: style, 3: full + " (subset of DejaVu Sans 2.37)", 4: full, 6: postscript, 16: family, 17: style}.get(record.nameID)
    if new is not None:
        name.setName(new, record.nameID, record.platformID, record.platEncID, record.langID)
font.save(target)
