//! Plots, written as SVG without a library: bars on a logarithmic scale to compare ratios, lines
//! from zero for quantities that grow.

use std::fmt::Write as _;

use crate::short;

const WIDTH: f64 = 720.0;
/// Left, top, right and bottom edge of the plot area.
const FIELD: (f64, f64, f64, f64) = (80.0, 50.0, 700.0, 340.0);
/// Number of legend entries in a row, and the width of each.
const IN_A_ROW: usize = 4;
const ENTRY: f64 = 170.0;
const COLOURS: [&str; 10] = [
    "#1b6ca8", "#d1495b", "#66a182", "#8d6a9f", "#edae49", "#30638e", "#7f4f24", "#5f5f5f",
    "#00a6a6", "#c77dff",
];

/// Values of one subject, one per label; a missing one is left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Entry in the legend.
    pub name: String,
    /// Values, in the order of the labels.
    pub points: Vec<Option<f64>>,
}

impl Series {
    /// Creates a series of these values.
    pub fn new(name: impl Into<String>, points: Vec<Option<f64>>) -> Self {
        Self {
            name: name.into(),
            points,
        }
    }
}

/// Draws bars on a logarithmic scale, on which ratios can be compared.
pub fn bars(title: &str, unit: &str, labels: &[&str], series: &[Series]) -> String {
    let (left, top, right, bottom) = FIELD;
    let floor = values(series)
        .filter(|value| *value > 0.0)
        .fold(f64::INFINITY, f64::min)
        .log10()
        .floor();
    let ceiling = values(series)
        .fold(f64::MIN_POSITIVE, f64::max)
        .log10()
        .ceil()
        .max(floor + 1.0);
    let y = |value: f64| {
        let part = (value.max(10_f64.powf(floor)).log10() - floor) / (ceiling - floor);
        bottom - part * (bottom - top)
    };
    let mut svg = Drawing::new(title, series);
    let mut power = floor;
    while power <= ceiling {
        svg.grid(
            y(10_f64.powf(power)),
            &format!("{} {unit}", short_power(power)),
        );
        power += 1.0;
    }
    let group = (right - left) / labels.len() as f64;
    let bar = group * 0.8 / series.len() as f64;
    for (index, label) in labels.iter().enumerate() {
        let start = left + group * index as f64;
        for (which, series) in series.iter().enumerate() {
            let x = start + group * 0.1 + bar * which as f64;
            let middle = x + bar / 2.0;
            match series.points.get(index).copied().flatten() {
                Some(value) => {
                    let (at, colour) = (y(value), COLOURS[which % COLOURS.len()]);
                    let high = (bottom - at).max(1.0);
                    svg.line(&format!(
                        "<rect x=\"{x:.1}\" y=\"{at:.1}\" width=\"{bar:.1}\" height=\"{high:.1}\" \
                         fill=\"{colour}\"/>"
                    ));
                    svg.small(middle, at - 3.0, &short(value));
                }
                None => svg.small(middle, bottom - 3.0, "none"),
            }
        }
        svg.label(start + group / 2.0, label);
    }
    svg.end()
}

/// Draws lines over evenly spaced labels, from zero upwards.
pub fn lines(title: &str, unit: &str, labels: &[&str], series: &[Series]) -> String {
    let (left, top, right, bottom) = FIELD;
    let most = values(series).fold(0.0, f64::max);
    let step = step(most);
    let ceiling = (most / step).ceil().max(1.0) * step;
    let y = |value: f64| bottom - (value / ceiling).clamp(0.0, 1.0) * (bottom - top);
    let x = |index: usize| left + (right - left) * (index as f64 + 0.5) / labels.len() as f64;
    let mut svg = Drawing::new(title, series);
    let mut value = 0.0;
    while value <= ceiling * 1.000_1 {
        svg.grid(y(value), &format!("{} {unit}", tick(value)));
        value += step;
    }
    for (index, label) in labels.iter().enumerate() {
        svg.label(x(index), label);
    }
    for (which, series) in series.iter().enumerate() {
        let colour = COLOURS[which % COLOURS.len()];
        let points: Vec<_> = series
            .points
            .iter()
            .enumerate()
            .filter_map(|(index, value)| Some((x(index), y((*value)?))))
            .collect();
        let path: Vec<_> = points
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        svg.line(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            path.join(" ")
        ));
        for (x, y) in points {
            svg.line(&format!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
            ));
        }
    }
    svg.end()
}

fn values(series: &[Series]) -> impl Iterator<Item = f64> {
    series
        .iter()
        .flat_map(|series| series.points.iter().flatten().copied())
        .filter(|value| value.is_finite())
}

/// Returns the distance of the grid lines of an axis up to `most`: 1, 2 or 5 times a power of ten,
/// at most six of them.
fn step(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let unit = 10_f64.powf((most / 5.0).log10().floor());
    let of = [1.0, 2.0, 5.0, 10.0].map(|times| times * unit);
    of.into_iter()
        .find(|step| most / step <= 6.0)
        .unwrap_or(10.0 * unit)
}

/// A drawing under construction: text of SVG elements.
struct Drawing {
    svg: String,
    series: Vec<String>,
}

impl Drawing {
    fn new(title: &str, series: &[Series]) -> Self {
        let rows = series.len().div_ceil(IN_A_ROW);
        let height = 376.0 + 20.0 * rows as f64;
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{}\" y=\"24\" font-size=\"16\">{}</text>\n",
            FIELD.0,
            escape(title)
        );
        Self {
            svg,
            series: series.iter().map(|series| series.name.clone()).collect(),
        }
    }

    fn line(&mut self, text: &str) {
        self.svg.push_str(text);
        self.svg.push('\n');
    }

    /// Draws a horizontal grid line and its value.
    fn grid(&mut self, y: f64, text: &str) {
        let (left, _, right, _) = FIELD;
        self.line(&format!(
            "<line x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>"
        ));
        self.line(&format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 6.0,
            y + 4.0,
            escape(text)
        ));
    }

    /// Draws a label below the plot area.
    fn label(&mut self, x: f64, text: &str) {
        self.line(&format!(
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            FIELD.3 + 18.0,
            escape(text)
        ));
    }

    fn small(&mut self, x: f64, y: f64, text: &str) {
        self.line(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" font-size=\"9\">{text}</text>"
        ));
    }

    /// Draws the legend, and returns the complete document.
    fn end(mut self) -> String {
        for (which, name) in std::mem::take(&mut self.series).iter().enumerate() {
            let (row, column) = (which / IN_A_ROW, which % IN_A_ROW);
            let (x, y) = (FIELD.0 + ENTRY * column as f64, 368.0 + 20.0 * row as f64);
            let colour = COLOURS[which % COLOURS.len()];
            self.line(&format!(
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
            ));
            self.line(&format!(
                "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + 18.0,
                y + 10.0,
                escape(name)
            ));
        }
        let _ = writeln!(self.svg, "</svg>");
        self.svg
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Formats a value of a linear axis.
fn tick(value: f64) -> String {
    match value {
        v if v >= 1e4 => short(v),
        v if v.fract() == 0.0 => format!("{v}"),
        v => format!("{v:.2}"),
    }
}

/// Formats `10^power` with a unit prefix.
fn short_power(power: f64) -> String {
    match power as i32 {
        power @ ..0 => format!("{}", 10_f64.powi(power)),
        power @ 0..3 => format!("{}", 10_u32.pow(power as u32)),
        power @ 3..6 => format!("{} k", 10_u32.pow(power as u32 - 3)),
        power => format!("{} M", 10_u64.pow(power as u32 - 6)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_a_bar_per_value_and_says_where_there_is_none() {
        let series = [
            Series::new("a", vec![Some(10.0), Some(1e6)]),
            Series::new("b", vec![None, Some(0.0)]),
        ];
        let svg = bars("title", "IOPS", &["x", "y"], &series);
        assert_eq!(svg.matches("<rect x=").count(), 3 + 2, "bars and legend");
        assert_eq!(svg.matches(">none<").count(), 1);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_line_has_a_dot_per_value_and_skips_what_is_missing() {
        let series = [
            Series::new("a < b", vec![Some(1.0), None, Some(3.0)]),
            Series::new("nothing", vec![None, None, None]),
        ];
        let svg = lines("title", "M/s", &["1", "2", "4"], &series);
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(svg.contains("a &lt; b") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn an_axis_has_a_handful_of_round_steps() {
        assert_eq!([1.0, 3.0, 95.0, 100.0].map(step), [0.2, 0.5, 20.0, 20.0]);
        assert_eq!(step(0.0), 1.0);
    }
}
