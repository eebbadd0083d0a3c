//! Counters that only grow, read twice.

/// Declares counters, and what is added to them between two moments.
macro_rules! counts {
    ($(#[$doc:meta])* $type:ident { $($(#[$field_doc:meta])* $field:ident,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct $type { $($(#[$field_doc])* pub $field: u64,)+ }

        impl $type {
            /// Returns what was added since `earlier`.
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($field: self.$field.saturating_sub(earlier.$field)),+ }
            }

            /// Returns the sum of both.
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($field: self.$field.saturating_add(other.$field)),+ }
            }
        }
    };
}
pub(crate) use counts;
