//! One measurement in a process of its own: `vtd-case NAME LEASES` prints nanoseconds. `vtd-bench`
//! runs this program and the one that was built from the same source over the crates of an old
//! commit in turns (see `scripts/old.sh vtd-case`).
#![forbid(unsafe_code)]

#[path = "../cases.rs"]
mod cases;
#[path = "../guest.rs"]
mod guest;

fn main() {
    let mut args = std::env::args().skip(1);
    let case = args.next().unwrap_or_default();
    let leases = args.next().and_then(|leases| leases.parse().ok());
    match cases::run(&case, leases.unwrap_or(0)) {
        Some(ns) => println!("{ns}"),
        None => {
            eprintln!(
                "vtd-case NAME [LEASES]; the names: {}",
                cases::CASES.join(", ")
            );
            std::process::exit(2);
        }
    }
}
