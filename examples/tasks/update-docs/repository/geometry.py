"""Plane geometry."""

import math


def distance(a, b, *, squared=False):
    """The distance of two points.

    With `squared` the square of it, which takes no root."""
    square = (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2
    return square if squared else math.sqrt(square)


def polygon_area(points):
    """The area of a simple polygon, whichever way round its points go."""
    return abs(_doubled_area(points)) / 2


def _doubled_area(points):
    return sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(points, points[1:] + points[:1], strict=True))


def rotated(point, degrees, around=(0, 0)):
    """A point turned counter-clockwise."""
    radians = math.radians(degrees)
    x, y = point[0] - around[0], point[1] - around[1]
    cosine, sine = math.cos(radians), math.sin(radians)
    return (around[0] + x * cosine - y * sine, around[1] + x * sine + y * cosine)
