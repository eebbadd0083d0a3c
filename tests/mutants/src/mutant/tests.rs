use super::*;

const KEYS: &str = "package: iova\ntarget: lib\ntest: a::b\ncfg: loom\nsays: lost";
const DIFF: &str = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n";

fn parse(keys: &str) -> Result<Head> {
    let text = format!("What it is.\nIn words.\n\n{keys}\n\n{DIFF}");
    Ok(Mutant::parse("iova/x", &text)?.head)
}

#[test]
fn a_head_says_what_the_mistake_is_and_who_finds_it() {
    let head = parse(KEYS).expect("a head");
    assert_eq!(head.what, "What it is.\nIn words.");
    assert_eq!(
        (head.package.as_str(), &head.target),
        ("iova", &Target::Lib)
    );
    assert_eq!(
        (&head.tests[..], head.cfg),
        (&["a::b".to_string()][..], Cfg::Loom)
    );
    assert_eq!(head.expect, Expect::Red("lost".to_string()));
    assert_eq!(head.env, []);

    let keys =
        "package: iova\ntarget: schedules\ntest: c\ntest: d\nexpect: green\nenv: N=1\nenv: M=a=b";
    let head = parse(keys).expect("a head");
    assert_eq!(head.target, Target::Test("schedules".to_string()));
    assert_eq!((head.cfg, &head.expect), (Cfg::None, &Expect::Green));
    assert_eq!(head.tests, ["c", "d"]);
    let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
    assert_eq!(head.env, [pair("N", "1"), pair("M", "a=b")]);
}

#[test]
fn a_head_that_leaves_something_open_is_refused() {
    let cases = [
        (KEYS.replace("package: iova\n", ""), "no package"),
        (KEYS.replace("target: lib\n", ""), "no target"),
        (KEYS.replace("test: a::b\n", ""), "no test"),
        (KEYS.replace("\nsays: lost", ""), "no says"),
        (KEYS.replace("a::b", ""), "says nothing"),
        (KEYS.replace("loom", "miri"), "not none, loom"),
        (format!("{KEYS}\nexpect: green"), "of a test that passes"),
        (format!("{KEYS}\nexpect: blue"), "not red or green"),
        (format!("{KEYS}\ncfg: none"), "said twice"),
        (format!("{KEYS}\nfilter: c"), "no such key"),
        (format!("{KEYS}\nenv: N"), "not NAME=VALUE"),
        (format!("{KEYS}\nwords"), "no «key: value»"),
    ];
    for (keys, what) in cases {
        let error = format!("{:#}", parse(&keys).expect_err(&keys));
        assert!(error.contains(what), "{keys}: {error}");
    }
    for text in [DIFF.to_string(), format!("words\n{DIFF}"), String::new()] {
        Mutant::parse("iova/x", &text).expect_err("no head");
    }
}
