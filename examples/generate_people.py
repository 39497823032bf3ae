"""Generate the federation of people in `examples/generated/`. No real person is in it.

Run `python examples/generate_people.py`. Each row is a day of one person: hours of sleep, steps, resting pulse,
caffeine and hours at a screen, and how the person felt on the next day. People differ in how much sleep they need, in
their usual pulse, and in how much caffeine and exercise cost them, so a model of their own fits them better than one
for all.
"""

import csv
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).with_name("generated")
HEADER = ["person", "sleep_hours", "steps", "resting_pulse", "caffeine_mg", "screen_hours", "state"]
STATES = ["exhausted", "rested", "tired"]
NUM_PEOPLE = 24


def days(rng: np.random.Generator, name: str, num: int) -> list[list]:
    """The days of one person, whose habits and needs are drawn first."""
    need, pulse, usual = rng.normal(7.4, 0.8), rng.normal(62, 5), rng.normal(7.2, 0.4)
    caffeine_costs, steps_cost, screen_costs = rng.normal(0.6, 0.3), rng.normal(0.2, 0.5), rng.normal(0.4, 0.3)
    rows = []
    for _ in range(num):
        sleep, steps = rng.normal(usual, 1.2), rng.gamma(4.0, 2000.0)
        beats, caffeine, screen = rng.normal(pulse, 3.0), rng.gamma(2.0, 80.0), rng.gamma(4.0, 1.2)
        debt = need - sleep + 0.25 * (beats - pulse) + caffeine_costs * (caffeine - 160) / 110
        debt += steps_cost * (steps - 8000) / 4000 + screen_costs * (screen - 4.8) / 2.4 + rng.normal(0, 0.4)
        state = "rested" if debt < -0.3 else "tired" if debt < 1.4 else "exhausted"
        rows.append([name, f"{sleep:.1f}", f"{steps:.0f}", f"{beats:.0f}", f"{caffeine:.0f}", f"{screen:.1f}", state])
    return rows


def write(path: Path, header: list[str], rows: list[list]) -> None:
    """Write one CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def main(folder: Path = FOLDER) -> None:
    """Write the federation, two newcomers with labels, and a week of one of them without."""
    rng = np.random.default_rng(30)
    people = [row for i in range(NUM_PEOPLE) for row in days(rng, f"person-{i:02}", int(rng.integers(14, 43)))]
    anna, bert = days(rng, "anna", 47), days(rng, "bert", 30)
    write(folder / "people.csv", HEADER, people)
    write(folder / "anna.csv", HEADER, anna[:40])
    write(folder / "bert.csv", HEADER, bert)
    write(folder / "anna-next-week.csv", HEADER[1:-1], [row[1:-1] for row in anna[40:]])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
