//! Paths in sources, as words.

/// One leaf of a `use`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Use {
    /// The path: what it leads to or, of a glob, what all is taken of.
    pub(crate) path: Vec<String>,
    /// The name it brings in; `None` of a glob.
    pub(crate) name: Option<String>,
}

/// The path at the start, as far as it is words.
pub(crate) fn path_at(tokens: &[String]) -> Vec<String> {
    let mut path = Vec::new();
    let mut rest = tokens;
    while let [word, after @ ..] = rest
        && is_word(word)
    {
        path.push(word.clone());
        match after {
            [colons, after @ ..] if colons == "::" => rest = after,
            _ => break,
        }
    }
    path
}

/// The leaves of the `use` whose tree starts here. Paths that start with `::` are other crates',
/// and left out.
pub(crate) fn uses(tokens: &[String]) -> Vec<Use> {
    let mut found = Vec::new();
    tree(tokens, &[], &mut found);
    found
}

/// Adds the leaves of the tree at the start, behind `before`. What follows the tree.
fn tree<'a>(tokens: &'a [String], before: &[String], found: &mut Vec<Use>) -> &'a [String] {
    let mut path = before.to_vec();
    let mut rest = tokens;
    loop {
        match rest {
            [open, inside @ ..] if open == "{" => return branches(inside, &path, found),
            [star, after @ ..] if star == "*" => {
                found.push(Use { path, name: None });
                return after;
            }
            [word, after @ ..] if is_word(word) => {
                // `a::{self}` is `a`; at the start it is a place.
                if word != "self" || path.is_empty() {
                    path.push(word.clone());
                }
                match after {
                    [colons, after @ ..] if colons == "::" => rest = after,
                    [by, name, after @ ..] if by == "as" => {
                        let name = Some(name.clone());
                        found.push(Use { path, name });
                        return after;
                    }
                    after => {
                        let name = path.last().cloned();
                        found.push(Use { path, name });
                        return after;
                    }
                }
            }
            after => return after,
        }
    }
}

/// Adds the leaves of the branches inside a bracket. What follows it.
fn branches<'a>(tokens: &'a [String], before: &[String], found: &mut Vec<Use>) -> &'a [String] {
    let mut rest = tokens;
    loop {
        rest = match rest {
            [] => return rest,
            [close, after @ ..] if close == "}" => return after,
            [comma, after @ ..] if comma == "," => after,
            _ => {
                let after = tree(rest, before, found);
                // What is no tree is passed over.
                if after.len() == rest.len() {
                    &rest[1..]
                } else {
                    after
                }
            }
        };
    }
}

fn is_word(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::lex;

    #[test]
    fn every_leaf_of_a_use_is_found() {
        let source = "crate::{a, b::{self, C as D, e::{F, *}}, super::g}; h";
        let shown = |Use { path, name }: Use| {
            format!("{} {}", path.join("::"), name.as_deref().unwrap_or("*"))
        };
        let found: Vec<_> = uses(&lex(source)).into_iter().map(shown).collect();
        assert_eq!(
            found,
            [
                "crate::a a",
                "crate::b b",
                "crate::b::C D",
                "crate::b::e::F F",
                "crate::b::e *",
                "crate::super::g g",
            ]
        );
    }

    #[test]
    fn a_path_ends_where_its_words_do() {
        for (source, path) in [
            ("crate::a::f::<u8>()", "crate::a::f"),
            ("super::super::b;", "super::super::b"),
            ("crate::{a, b}", "crate"),
            ("self::x.y", "self::x"),
        ] {
            assert_eq!(path_at(&lex(source)).join("::"), path);
        }
    }
}
