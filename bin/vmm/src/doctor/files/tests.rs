use super::*;

const CPUINFO: &str = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu vme svm npt\n\
                           bugs\t\t: sysret_ss_attrs\n\nprocessor\t: 1\nflags\t\t: fpu\n";

#[test]
fn cpuinfo_gives_flags_and_count() {
    let flags = cpu_flags(CPUINFO);
    assert!(flags.contains("svm") && flags.contains("fpu") && !flags.contains("sysret_ss_attrs"));
    assert_eq!(cpu_count(CPUINFO), 2);
    assert!(cpu_flags("").is_empty());
}

#[test]
fn meminfo_keys_are_matched_whole() {
    let text =
        "MemTotal:       24688684 kB\nMemAvailable:   23000000 kB\nHugePages_Total:       4\n";
    assert_eq!(meminfo(text, "MemAvailable"), 23_000_000);
    assert_eq!(meminfo(text, "HugePages_Total"), 4);
    assert_eq!(meminfo(text, "Mem"), 0);
    assert_eq!(meminfo("MemTotal: many", "MemTotal"), 0);
}

#[test]
fn releases_compare_by_number() {
    assert_eq!(Release::parse("6.1.0-56-cloud-amd64\n"), Release(6, 1));
    assert!(Release::parse("5.19-rc1") > Release(5, 7));
    assert_eq!(Release::parse("unknown"), Release(0, 0));
}

#[test]
fn small_files_are_understood() {
    assert!(switch("Y\n") && switch("1\n") && !switch("N\n") && !switch("-1\n"));
    let status = "Name:\tx\nCapEff:\t0000000000001000\n";
    assert!(has_capability(status, 12) && !has_capability(status, 21));
    assert!(!has_capability("", 12));
}
