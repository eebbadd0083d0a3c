//! The nearest existing name to one that does not exist.

/// Most letters that a name may differ by from what was meant.
const MOST: usize = 2;

/// Returns the name of `known` that is nearest to `name`, if one is near.
pub fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let distance = |other: &&str| strsim::damerau_levenshtein(name, other);
    let best = known.iter().copied().min_by_key(|other| distance(other))?;
    // Names of two letters are all near each other.
    let most = MOST.min(name.chars().count().saturating_sub(1) / 2);
    (distance(&best) <= most.max(1) && name.len() > 1).then_some(best)
}

/// Returns `; did you mean "NAME"?`, or nothing.
pub fn hint(name: &str, known: &[&str]) -> String {
    match nearest(name, known) {
        Some(meant) => format!("; did you mean {meant:?}?"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_near_and_another_word_is_not() {
        let known = ["readonly", "path", "ip", "queue-size"];
        for (name, meant) in [
            ("read-only", Some("readonly")),
            ("pth", Some("path")),
            ("apth", Some("path")),
            ("queuesize", Some("queue-size")),
            ("colour", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(nearest(name, &known), meant, "{name}");
        }
        assert_eq!(nearest("path", &[]), None);
    }
}
