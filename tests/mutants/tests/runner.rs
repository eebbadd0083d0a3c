//! The runner on a tree of one small crate, with a mutant for each outcome.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use mutants::mutant::{Mutant, names};
use mutants::record::record;
use mutants::run::{Failure, Runner};
use mutants::tree::git;

const MANIFEST: &str = "[package]\nname = \"small\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
     [lints.rust]\nunexpected_cfgs = \"allow\"\n";
const LOCK: &str = "version = 4\n\n[[package]]\nname = \"small\"\nversion = \"0.0.0\"\n";
const SOURCE: &str = "\
pub fn sum(all: &[u32]) -> u32 {
    let mut sum = 0;
    for one in all {
        sum += one;
    }
    sum
}

pub fn twice(one: u32) -> u32 {
    2 * one
}

#[cfg(test)]
mod tests {
    #[test]
    fn sums() {
        assert_eq!(super::sum(&[2, 2]), 4, \"a wrong sum\");
    }

    #[test]
    fn doubles() {
        assert_eq!(super::twice(3), 6, \"not twice as much\");
    }

    #[test]
    #[cfg(loom)]
    fn sums_under_loom() {
        assert_eq!(super::sum(&[2, 3]), 5, \"a wrong sum under loom\");
    }

    #[test]
    #[ignore = \"never\"]
    fn ignored() {}
}
";
const OUTSIDE: &str = "\
#[test]
fn sums_from_outside() {
    let wide = std::env::var(\"WIDE\").is_ok();
    assert!(!wide || small::sum(&[2, 2]) == 4, \"a wrong sum outside\");
}
";

fn write(tree: &Path, file: &str, text: &str) {
    let file = tree.join(file);
    fs::create_dir_all(file.parent().expect("a folder")).expect("made");
    fs::write(file, text).expect("written");
}

fn tree() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let tree = folder.path();
    write(tree, "Cargo.toml", MANIFEST);
    write(tree, "Cargo.lock", LOCK);
    write(tree, ".gitignore", "/target\n");
    write(tree, "src/lib.rs", SOURCE);
    write(tree, "tests/outside.rs", OUTSIDE);
    fs::create_dir_all(tree.join("tests/mutants/small")).expect("made");
    git(tree, &["init", "-q"]).expect("git");
    git(tree, &["add", "."]).expect("git");
    folder
}

/// A mutant that makes a line another one.
fn mutant(tree: &Path, name: &str, keys: &str, [from, to]: [&str; 2]) -> Mutant {
    let text = format!(
        "What it is.\n\npackage: small\n{keys}\n\n--- a/src/lib.rs\n+++ b/src/lib.rs\n@@ -1 +1 @@\n\
         -{from}\n+{to}\n"
    );
    write(tree, &format!("tests/mutants/small/{name}.patch"), &text);
    Mutant::read(tree, &format!("small/{name}")).expect("a mutant")
}

const SUM: &str = "        sum += one;";
const WRONG: [&str; 2] = [SUM, "        sum = *one;"];
const IN_SUMS: &str = "target: lib\ntest: tests::sums\nsays: a wrong sum";

fn verdict(runner: &mut Runner, mutant: &Mutant) -> Result<String, Failure> {
    runner.run(mutant, None).expect("cargo runs").verdict
}

#[test]
fn each_mutant_has_the_verdict_that_it_deserves() {
    let folder = tree();
    let tree = folder.path();
    let limit = Duration::from_secs(300);
    let mut runner = Runner::new(tree, &tree.join("target/mutants"), limit).expect("alone");
    let mut of = |name: &str, keys: &str, change: [&str; 2]| {
        verdict(&mut runner, &mutant(tree, name, keys, change))
    };

    // Red, by the named test and no other; each with a build that knows nothing of the one before.
    assert_eq!(
        of("red", IN_SUMS, WRONG),
        Ok("red: tests::sums".to_string())
    );
    let doubles = "target: lib\ntest: tests::doubles\nsays: not twice";
    let green = |test: &str| Err(Failure::Green(test.to_string()));
    assert_eq!(of("other", doubles, WRONG), green("tests::doubles"));
    let both = format!("{IN_SUMS}\ntest: tests::doubles");
    assert_eq!(of("both", &both, WRONG), green("tests::doubles"));
    let twice = ["    2 * one", "    3 * one"];
    assert!(of("twice", doubles, twice).is_ok());
    assert_eq!(of("sound", IN_SUMS, twice), green("tests::sums"));

    // Not found for what it is.
    let odd = "target: lib\ntest: tests::sums\nsays: an odd sum";
    let other = of("another-reason", odd, WRONG).expect_err("not what it says");
    assert!(
        matches!(other, Failure::RedForAnotherReason(_, printed) if printed.contains("a wrong sum"))
    );

    // An edit that changes nothing, and one that is said to.
    let equivalent = "target: lib\ntest: tests::sums\nexpect: green";
    assert!(of("equivalent", equivalent, [SUM, "        sum = sum + one;"]).is_ok());
    let noticed = of("not-equivalent", equivalent, WRONG);
    assert!(matches!(noticed, Err(Failure::Red(_))));

    // What is no verdict.
    let gone = of("gone", IN_SUMS, ["        sum -= one;", SUM]).expect_err("it does not apply");
    assert!(matches!(&gone, Failure::DoesNotApply(why) if why.contains("src/lib.rs, hunk 1")));
    let advice = gone.advice("small/gone", "What it is.").expect("advice");
    assert!(advice.contains("--record small/gone"));
    let broken =
        of("broken", IN_SUMS, [SUM, "        sum += two;"]).expect_err("it does not compile");
    assert!(matches!(&broken, Failure::DoesNotCompile(errors) if errors.contains("error")));
    assert!(broken.details().contains("error"));
    for test in ["tests::sum", "tests::ignored", "tests"] {
        let keys = IN_SUMS.replace("tests::sums", test);
        let verdict = of("no-test", &keys, WRONG);
        assert_eq!(verdict, Err(Failure::NoSuchTest(test.to_string())));
    }
    let aborts = of("aborts", IN_SUMS, [SUM, "        std::process::abort();"]);
    assert!(matches!(aborts, Err(Failure::Broken(how, _)) if how.contains("signal")));
    let exits = of("exits", IN_SUMS, [SUM, "        std::process::exit(101);"]);
    assert!(matches!(exits, Err(Failure::Broken(..))));

    // With a cfg of its own, which has a copy of its own; and a test outside, with a variable.
    let under_loom = "target: lib\ntest: tests::sums_under_loom\nsays: under loom";
    let nowhere = of("not-loom", under_loom, WRONG);
    assert!(matches!(nowhere, Err(Failure::NoSuchTest(_))));
    assert!(of("loom", &format!("{under_loom}\ncfg: loom"), WRONG).is_ok());
    let outside = "target: outside\ntest: sums_from_outside\nsays: a wrong sum outside";
    assert_eq!(of("narrow", outside, WRONG), green("sums_from_outside"));
    assert!(of("wide", &format!("{outside}\nenv: WIDE=1"), WRONG).is_ok());

    // The tree itself was never touched, and the copies are sound.
    for file in [
        "src/lib.rs",
        "target/mutants/none/tree/src/lib.rs",
        "target/mutants/loom/tree/src/lib.rs",
    ] {
        assert_eq!(fs::read_to_string(tree.join(file)).expect(file), SOURCE);
    }
}

#[test]
fn a_test_that_hangs_is_ended_and_is_no_verdict() {
    let folder = tree();
    let tree = folder.path();
    let limit = Duration::from_secs(1);
    let mut runner = Runner::new(tree, &tree.join("target/mutants"), limit).expect("alone");
    let hangs = mutant(
        tree,
        "hangs",
        IN_SUMS,
        [SUM, "        loop { std::thread::park(); }"],
    );
    assert_eq!(verdict(&mut runner, &hangs), Err(Failure::TimedOut(limit)));
}

#[test]
fn a_test_that_the_run_has_no_time_for_is_ended_and_is_no_failure_of_its() {
    let folder = tree();
    let tree = folder.path();
    let limit = Duration::from_secs(300);
    let mut runner = Runner::new(tree, &tree.join("target/mutants"), limit).expect("alone");
    let hangs = mutant(
        tree,
        "hangs",
        IN_SUMS,
        [SUM, "        loop { std::thread::park(); }"],
    );
    let red = mutant(tree, "red", IN_SUMS, WRONG);
    let others = format!("{IN_SUMS}\ncfg: loom");
    let others = mutant(
        tree,
        "others",
        &others.replace("sums", "sums_under_loom"),
        WRONG,
    );
    assert!(!runner.has_built(&hangs), "nothing is built");
    let mut run = |mutant: &Mutant, left: u64| {
        let end = Instant::now() + Duration::from_secs(left);
        runner.run(mutant, Some(end)).expect("cargo runs").verdict
    };
    // Its build alone takes longer.
    assert_eq!(run(&hangs, 0), Err(Failure::OutOfTime));
    assert!(run(&red, 200).is_ok());
    // A build is one of a package with a cfg.
    assert!(runner.has_built(&red));
    assert!(!runner.has_built(&others), "another cfg");
    let mut elsewhere = red;
    elsewhere.head.package = "large".into();
    assert!(!runner.has_built(&elsewhere), "another package");
}

#[test]
fn a_copy_left_with_a_mistake_is_mended_and_the_tree_as_it_is_now_is_copied() {
    let folder = tree();
    let tree = folder.path();
    let work = tree.join("target/mutants");
    let limit = Duration::from_secs(300);
    let red = mutant(tree, "red", IN_SUMS, WRONG);
    let mut runner = Runner::new(tree, &work, limit).expect("alone");
    assert!(Runner::new(tree, &work, limit).is_err(), "two at once");
    assert!(verdict(&mut runner, &red).is_ok());
    drop(runner);
    // Interrupted; and then the tree goes on.
    write(
        &work,
        "none/tree/src/lib.rs",
        &SOURCE.replace(WRONG[0], WRONG[1]),
    );
    write(&work, "none/tree/src/left.rs", "");
    write(&work, "none/tree/crates/gone/src/lib.rs", "");
    write(tree, "src/lib.rs", &format!("mod new;\n{SOURCE}"));
    write(tree, "src/new.rs", "");
    fs::remove_file(tree.join("tests/outside.rs")).expect("removed");
    let mut runner = Runner::new(tree, &work, limit).expect("alone");
    assert!(verdict(&mut runner, &red).is_ok());
    let copy = work.join("none/tree");
    assert!(copy.join("src/new.rs").exists());
    assert!(!copy.join("src/left.rs").exists());
    assert!(!copy.join("tests/outside.rs").exists());
    // Cargo would take an empty folder for a crate of the workspace without a manifest.
    assert!(!copy.join("crates").exists());
}

#[test]
fn a_mistake_in_the_sources_is_recorded_with_as_little_context_as_finds_it() {
    let folder = tree();
    let tree = folder.path();
    let patch = tree.join("tests/mutants/small/new.patch");
    record(tree, "small/new").expect_err("there is no difference");
    record(tree, "../new").expect_err("no name");
    write(tree, "src/lib.rs", &SOURCE.replace(WRONG[0], WRONG[1]));
    let advice = record(tree, "small/new").expect("a difference");
    assert!(advice.ends_with("git checkout -- src/lib.rs"), "{advice}");
    assert_eq!(names(tree).expect("read"), ["small/new"]);
    // Filled in; another mistake goes under the same head.
    let text = fs::read_to_string(&patch).expect("written");
    assert!(
        text.contains("\n-        sum += one;\n+        sum = *one;\n"),
        "{text}"
    );
    let (_, diff) = mutants::mutant::split(&text);
    fs::write(
        &patch,
        format!("It forgets.\n\npackage: small\n{IN_SUMS}\n\n{diff}"),
    )
    .expect("written");
    let twins = "fn a() {\n    b();\n    c();\n}\n\nfn d() {\n    b();\n    c();\n}\n";
    write(tree, "src/twins.rs", twins);
    write(tree, "src/lib.rs", SOURCE);
    git(tree, &["add", "src"]).expect("git");
    write(tree, "src/twins.rs", &twins.replacen("    b();\n", "", 1));
    record(tree, "small/new").expect("a difference");
    let mutant = Mutant::read(tree, "small/new").expect("a mutant");
    assert_eq!(mutant.head.what, "It forgets.");
    let twin = &mutant.patch.files[0];
    assert_eq!(
        twin.apply(twins).expect("it fits"),
        twins.replacen("    b();\n", "", 1)
    );
}
