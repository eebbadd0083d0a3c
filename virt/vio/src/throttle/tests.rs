use super::*;

/// Counts the requests of `bytes` that begin in `window_ns`, asked for as fast as possible.
fn begun(limits: RateLimits, bytes: u64, window_ns: u64, step_ns: u64) -> u64 {
    let mut throttle = Throttle::new(limits);
    let start = 1 << 40;
    let mut count = 0;
    let mut now = start;
    while now < start + window_ns {
        while throttle.is_open(now) {
            throttle.charge(now, bytes);
            count += 1;
        }
        now += step_ns;
    }
    count
}

#[test]
fn operations_come_at_their_rate_after_the_burst() {
    let limits = RateLimits {
        operations: Some(Rate {
            per_second: 1000,
            burst: 50,
        }),
        bytes: None,
    };
    let count = begun(limits, 4096, 2_000_000_000, 10_000);
    assert!((2045..=2055).contains(&count), "{count}");
}

#[test]
fn bytes_come_at_their_rate_whatever_the_request_size() {
    let rate = 100 << 20;
    let limits = RateLimits {
        operations: None,
        bytes: Some(Rate {
            per_second: rate,
            burst: 1 << 20,
        }),
    };
    for bytes in [512, 4096, 1 << 20] {
        let moved = begun(limits, bytes, 1_000_000_000, 1_000) * bytes;
        let fair = (rate + (1 << 20)) as f64;
        assert!(
            (moved as f64 - fair).abs() <= fair * 0.02 + bytes as f64,
            "{bytes}: {moved}"
        );
    }
}

#[test]
fn the_tighter_of_two_limits_holds() {
    let limits = RateLimits {
        operations: Some(Rate {
            per_second: 10_000,
            burst: 1,
        }),
        bytes: Some(Rate {
            per_second: 4096 * 500,
            burst: 4096,
        }),
    };
    let count = begun(limits, 4096, 1_000_000_000, 1_000);
    assert!((498..=503).contains(&count), "{count}");
}

#[test]
fn a_rest_is_not_saved_beyond_the_burst() {
    let mut throttle = Throttle::new(RateLimits {
        operations: Some(Rate {
            per_second: 10,
            burst: 3,
        }),
        bytes: None,
    });
    for start in [1 << 40, 1 << 50] {
        let mut count = 0;
        while throttle.is_open(start) {
            throttle.charge(start, 0);
            count += 1;
        }
        // The last one overdraws.
        assert!((3..=4).contains(&count), "{count}");
    }
}

#[test]
fn without_limits_it_is_always_open() {
    let mut throttle = Throttle::default();
    throttle.charge(5, u64::MAX);
    assert!(throttle.is_open(0));
}
