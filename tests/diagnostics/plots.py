"""The properties of every picture that a program can check."""

import numpy as np


def check_picture(figure, path, labels):
    """The file is a picture; titles and axes have text; texts lie inside and apart.

    Args:
      figure: a matplotlib figure.
      path: where it was saved.
      labels: the least number of axes with a label on both sides or an own title.
    """
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert figure.get_suptitle() or any(ax.get_title() for ax in figure.axes)
    named = [ax for ax in figure.axes if ax.get_xlabel() or ax.get_ylabel()]
    assert len(named) >= labels
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    pixels = np.asarray(figure.canvas.buffer_rgba())
    assert pixels[..., :3].std() > 5  # something is drawn
    width, height = figure.canvas.get_width_height()
    for ax in figure.axes:
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            if text.get_text() and text.get_visible():
                box = text.get_window_extent(renderer)
                assert box.x0 >= -1 and box.y0 >= -1, text.get_text()
                assert box.x1 <= width + 1 and box.y1 <= height + 1, text.get_text()
