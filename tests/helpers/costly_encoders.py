"""An image encoder whose ``prepare`` never ends, takes all memory or ends the process, by the colour of the picture."""

from __future__ import annotations

import os

from wrong.encoders import Colours, spec

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


class Costly(Colours):
    """Red pictures never end, green ones take more and more memory, and blue ones end the process."""

    spec = spec("Costly")

    def prepare(self, image):
        colour, taken = image.getpixel((0, 0)), []
        while colour == RED:
            pass
        while colour == GREEN:
            taken.append(bytearray(1 << 24))
        if colour == BLUE:
            os.abort()
        return super().prepare(image)
