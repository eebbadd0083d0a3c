//! The order of the repository's folders, lowest first, and the arrows that go against it; the page
//! that lists their crates.

use std::collections::BTreeSet;

use crate::workspace::Package;

/// A folder, and those that its crates may be built from.
pub type Layer = (&'static str, &'static [&'static str]);

/// The folders, lowest first: each may use itself and lower ones alone.
pub const LAYERS: [Layer; 9] = [
    ("libs", &["libs"]),
    ("virt", &["libs", "virt"]),
    ("host", &["libs", "virt", "host"]),
    ("guest", &["libs", "guest"]),
    ("tests", &["libs", "virt", "tests"]),
    ("lab", &["libs", "virt", "host", "guest", "lab"]),
    ("bench", &["libs", "virt", "host", "tests", "lab", "bench"]),
    ("bin", &["libs", "virt", "host", "tests", "lab", "bin"]),
    ("fuzz", &["libs", "virt", "tests", "bench", "fuzz"]),
];

/// A crate, and one of `tests/` that a feature of it brings in, which is off by default.
pub type Tool = (&'static str, &'static str);

/// Returns the layer of `folder`, from below.
fn height(folder: &str) -> Option<usize> {
    LAYERS.iter().position(|(name, _)| *name == folder)
}

/// The arrows between folders that are not allowed, in words. Packages of other people's are in no
/// folder.
///
/// Dependencies of a crate lie in a folder that its own may use. Those that only a feature brings
/// in may also be in `tests/` where `tools` has them, as long as that feature is off: by default,
/// and in all crates that may not use `tests/` themselves. Those of its tests are in `tests/`, or
/// no higher than itself. Tools that no feature brings in are to leave the list.
pub fn arrows_up<'a>(
    packages: impl Iterator<Item = &'a Package> + Clone,
    tools: &[Tool],
) -> Vec<String> {
    let named = |name: &str| packages.clone().find(|package| package.name == *name);
    let layer_of = |name: &String| named(name).map(|package| package.layer.as_str());
    let mut found = Vec::new();
    for package in packages.clone() {
        let (name, layer) = (&package.name, package.layer.as_str());
        let Some(own) = height(layer) else {
            found.push(format!("{name} is in {layer}, which is no layer"));
            continue;
        };
        let below = LAYERS[own].1;
        let mut note = |needs: &str, other: &String, may: &dyn Fn(&str) -> bool| {
            if let Some(there) = layer_of(other).filter(|there| !may(there)) {
                found.push(format!("{name} (in {layer}) {needs} {other} (in {there})"));
            }
        };
        for other in &package.needs {
            note("needs", other, &|there| below.contains(&there));
        }
        let by_default = package.brought_in(["default"]);
        for other in &package.may_need {
            let is_tool = tools.contains(&(name, other));
            let may = |there: &str| is_tool && there == "tests" || below.contains(&there);
            note("has a feature that needs", other, &may);
            if by_default.contains(other.as_str()) {
                note("needs by default", other, &|there| below.contains(&there));
            }
        }
        for (through, features) in &package.turns_on {
            let features = features.iter().map(String::as_str);
            let brought_in = named(through).map(|package| package.brought_in(features));
            for other in brought_in.into_iter().flatten() {
                let needs = format!("turns on a feature of {through} that needs");
                note(&needs, &other.to_owned(), &|there| below.contains(&there));
            }
        }
        for other in &package.tested_with {
            let may = |there: &str| there == "tests" || height(there).is_some_and(|at| at <= own);
            note("has tests that need", other, &may);
        }
    }
    for (name, tool) in tools {
        if !named(name).is_some_and(|package| package.may_need.contains(*tool)) {
            found.push(format!(
                "{name} has no feature that needs {tool}, which is in the list"
            ));
        }
    }
    found
}

/// The crates that a page's code map lists, and their folders. The map is the page's first fenced
/// text. A line that begins with `FOLDER/` starts a folder; in the lines below it, what stands
/// between gaps of two spaces and has no space is a crate.
fn listed(page: &str) -> BTreeSet<(&str, &str)> {
    let map = page.split("```text\n").nth(1).unwrap_or("");
    let map = map.split("```").next().unwrap_or("");
    let mut found = BTreeSet::new();
    let mut folder = "";
    for line in map.lines() {
        if let Some((name, _)) = line.split_once('/')
            && !name.contains(' ')
        {
            folder = name;
            continue;
        }
        let columns = line.split("  ").map(str::trim);
        let crates = columns.filter(|column| !column.is_empty() && !column.contains(' '));
        found.extend(crates.map(|name| (name, folder)));
    }
    found
}

/// Differences between a page's code map and the packages, in words: crates that are not listed, or
/// not in their folder, and listed ones that do not exist.
pub fn map_differences<'a>(page: &str, packages: impl Iterator<Item = &'a Package>) -> Vec<String> {
    let mut listed = listed(page);
    let mut found = Vec::new();
    for package in packages {
        let (name, layer) = (package.name.as_str(), package.layer.as_str());
        if !listed.remove(&(name, layer)) {
            found.push(format!("{name} is not listed in {layer}"));
        }
    }
    let gone = listed.into_iter();
    found.extend(gone.map(|(name, folder)| format!("there is no {name} in {folder}")));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, layer: &str) -> Package {
        Package {
            name: name.into(),
            layer: layer.into(),
            ..Package::default()
        }
    }

    const TOOL: [Tool; 1] = [("from", "tests-crate")];

    /// The tree in which only `from` needs anything, in this way: `to`.
    fn arrows(
        from: &str,
        to: &str,
        need: impl Fn(&mut Package) -> &mut BTreeSet<String>,
    ) -> Vec<String> {
        let folders = LAYERS.map(|(folder, _)| package(&format!("{folder}-crate"), folder));
        let mut all = [package("from", from)].to_vec();
        all.extend(folders);
        need(&mut all[0]).insert(format!("{to}-crate"));
        need(&mut all[0]).insert("others".into());
        let may = all[0].may_need.contains("tests-crate");
        arrows_up(all.iter(), if may { &TOOL } else { &[] })
    }

    #[test]
    fn layers_use_themselves_and_lower_ones() {
        for (at, (folder, below)) in LAYERS.iter().enumerate() {
            for other in *below {
                assert!(
                    height(other).is_some_and(|there| there <= at),
                    "{folder}: {other}"
                );
            }
        }
    }

    #[test]
    fn every_arrow_to_a_higher_folder_is_found_however_it_is_needed() {
        for (at, (from, _)) in LAYERS.iter().enumerate() {
            for (to, _) in &LAYERS[at + 1..] {
                let up = format!("from (in {from}) needs {to}-crate (in {to})");
                assert_eq!(arrows(from, to, |p| &mut p.needs), [up]);
                let is_tool = *to == "tests";
                let by_feature = arrows(from, to, |p| &mut p.may_need);
                assert_eq!(by_feature.is_empty(), is_tool, "{by_feature:?}");
                let by_tests = arrows(from, to, |p| &mut p.tested_with);
                assert_eq!(by_tests.is_empty(), is_tool, "{by_tests:?}");
            }
        }
        assert_eq!(
            arrows("virt", "bench", |p| &mut p.tested_with),
            ["from (in virt) has tests that need bench-crate (in bench)"]
        );
    }

    #[test]
    fn arrow_to_a_lower_folder_that_is_not_allowed_is_found() {
        assert_eq!(arrows("bin", "bench", |p| &mut p.needs).len(), 1);
        assert_eq!(arrows("bin", "bench", |p| &mut p.tested_with).len(), 0);
        assert_eq!(arrows("virt", "libs", |p| &mut p.needs).len(), 0);
    }

    /// `from` of `libs/` with a feature of each name that brings in the crate of `tests/`, and
    /// `user` of this folder that turns on features of it.
    fn with_features(features: &[&str], folder: &str, turned_on: &[&str]) -> [Package; 3] {
        let mut from = package("from", "libs");
        from.may_need.insert("tests-crate".into());
        let on = |name: &&str| ((*name).to_owned(), vec!["dep:tests-crate".to_owned()]);
        from.features = features.iter().map(on).collect();
        let mut user = package("user", folder);
        user.needs.insert("from".into());
        let turned_on = turned_on.iter().map(|&name| name.to_owned()).collect();
        user.turns_on.insert("from".into(), turned_on);
        [from, user, package("tests-crate", "tests")]
    }

    #[test]
    fn a_tool_by_a_feature_is_in_the_list() {
        let all = with_features(&["probe"], "virt", &["default"]);
        assert_eq!(arrows_up(all.iter(), &TOOL), [""; 0]);
        assert_eq!(
            arrows_up(all.iter(), &[]),
            ["from (in libs) has a feature that needs tests-crate (in tests)"]
        );
        assert_eq!(
            arrows_up(all[1..].iter(), &TOOL),
            ["from has no feature that needs tests-crate, which is in the list"]
        );
    }

    #[test]
    fn a_tool_is_off_by_default_and_in_all_that_may_not_use_it() {
        let by_default = with_features(&["default", "probe"], "virt", &[]);
        assert_eq!(
            arrows_up(by_default.iter(), &TOOL),
            ["from (in libs) needs by default tests-crate (in tests)"]
        );
        for (folder, below) in LAYERS {
            let all = with_features(&["probe"], folder, &["default", "probe"]);
            let found = arrows_up(all.iter(), &TOOL);
            let arrow = "turns on a feature of from that needs tests-crate (in tests)";
            match below.contains(&"tests") {
                true => assert_eq!(found, [""; 0]),
                false => assert_eq!(found, [format!("user (in {folder}) {arrow}")]),
            }
        }
    }

    #[test]
    fn a_folder_that_is_no_layer_is_found() {
        let all = [package("lonely", "attic")];
        assert_eq!(
            arrows_up(all.iter(), &[]),
            ["lonely is in attic, which is no layer"]
        );
    }

    #[test]
    fn code_map_lists_each_crate_in_its_folder_and_no_other() {
        let page = "# Page\nexitless\n```text\n\
             libs/   know nothing of lines\n  iova  lines    two of them\n\
                    bin/    compose\n  exitless                a program\nfuzz/   targets\n  fuzz\n\
                    ```\n\
                    ```text\n  vio\n```\n";
        let all = [
            ("iova", "libs"),
            ("lines", "libs"),
            ("exitless", "bin"),
            ("fuzz", "fuzz"),
        ];
        let package = |(name, layer): (&str, &str)| package(name, layer);
        assert_eq!(map_differences(page, all.map(package).iter()), [""; 0]);
        let others = [
            ("iova", "libs"),
            ("lines", "virt"),
            ("know", "libs"),
            ("fuzz", "fuzz"),
        ];
        assert_eq!(
            map_differences(page, others.map(package).iter()),
            [
                "lines is not listed in virt",
                "know is not listed in libs",
                "there is no exitless in bin",
                "there is no lines in libs",
            ]
        );
    }
}
