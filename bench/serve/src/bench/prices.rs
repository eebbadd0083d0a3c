//! Idle policies whose prices are compared, and the names of their rows.

/// The prices that a plot compares at 1,000 requests a second, beside the default and the fixed
/// policies.
pub const PRICED: [&str; 8] = [
    "adaptive",
    "adaptive:0.1",
    "adaptive:1",
    "adaptive:10",
    "adaptive:100",
    "sleep",
    "spin:50",
    "poll",
];

/// The name of a policy's row.
pub fn price_row(idle: &str) -> String {
    format!("open1k_{}", idle.replace([':', '.'], "_"))
}
