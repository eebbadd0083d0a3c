//! Blocks of `impl`, for the methods of one type that lie in several modules.

use crate::paths::path_at;
use crate::tokens::after_group;

/// The head of an `impl`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Impl {
    /// The type, as far as it is a path of words.
    pub(super) of: Vec<String>,
    /// Whether it is of no trait.
    pub(super) is_inherent: bool,
    /// Position of the bracket that opens its body.
    pub(super) open: usize,
}

/// The block that starts at `at`. A type may be an `impl` of a trait too, but not where an item may
/// start.
pub(super) fn impl_at(tokens: &[String], at: usize) -> Option<Impl> {
    let before = at.checked_sub(1).map_or(";", |at| tokens[at].as_str());
    if tokens[at] != "impl" || !["{", "}", ";", "]", "unsafe"].contains(&before) {
        return None;
    }
    let mut from = at + 1;
    if tokens.get(from)? == "<" {
        from = after_angles(tokens, from);
    }
    let (mut at, mut is_inherent) = (from, true);
    loop {
        match tokens.get(at)?.as_str() {
            "{" => break,
            // Not that of `for<'a> Fn(…)`.
            "for" if tokens.get(at + 1)? != "<" => {
                (is_inherent, from) = (false, at + 1);
                at += 1;
            }
            "<" => at = after_angles(tokens, at),
            "(" | "[" => at = after_group(tokens, at),
            _ => at += 1,
        }
    }
    let of = path_at(&tokens[from..at]);
    let open = at;
    (!of.is_empty()).then_some(Impl {
        of,
        is_inherent,
        open,
    })
}

/// Returns the position behind the `<` at `open` and its match.
fn after_angles(tokens: &[String], open: usize) -> usize {
    let mut depth = 0;
    let mut at = open;
    while at < tokens.len() {
        match tokens[at].as_str() {
            "<" => depth += 1,
            // Not that of `->`.
            ">" if tokens[at - 1] != "-" => depth -= 1,
            "(" | "[" | "{" => {
                at = after_group(tokens, at);
                continue;
            }
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// The name behind `self.` or `Self::` at the start, if it is that of a function or a constant.
pub(super) fn own_at(tokens: &[String]) -> Option<&str> {
    let [own, sign, name, after, ..] = tokens else {
        return None;
    };
    let is_call = ["(", "::"].contains(&after.as_str());
    match (own.as_str(), sign.as_str()) {
        ("self", ".") if is_call => Some(name),
        ("Self", "::") => Some(name),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::lex;

    #[test]
    fn head_of_an_impl_names_its_type() {
        for (source, of, is_inherent) in [
            ("impl A {}", "A", true),
            (
                "impl<T: Fn(u8) -> B<C>, const N: usize> m::A<T, { N }> where T: X {}",
                "m::A",
                true,
            ),
            ("impl<T> Trait<T> for super::A<T> {}", "super::A", false),
            ("impl<F> A<F> where F: for<'a> Fn(&'a B) {}", "A", true),
            ("unsafe impl Send for A {}", "A", false),
        ] {
            let tokens = lex(source);
            let at = tokens.iter().position(|word| word == "impl").expect("one");
            let found = impl_at(&tokens, at).expect(source);
            assert_eq!(
                (found.of.join("::").as_str(), found.is_inherent),
                (of, is_inherent),
                "{source}"
            );
            assert_eq!(found.open, tokens.len() - 2, "{source}");
        }
        for source in [
            "fn f(x: impl A) {}",
            "fn f() -> impl A {}",
            "impl Trait for &u8 {}",
        ] {
            let tokens = lex(source);
            let at = tokens.iter().position(|word| word == "impl").expect("one");
            assert_eq!(impl_at(&tokens, at), None, "{source}");
        }
    }
}
