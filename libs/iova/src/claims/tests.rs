use super::*;

#[test]
fn a_core_has_one_handle_and_a_reset_needs_all() {
    let claims = Claims::new(2).expect("two cores");
    claims.claim(CoreId(1)).expect("free");
    assert_eq!(
        claims.claim(CoreId(1)),
        Err(ClaimError::InUse { core: CoreId(1) })
    );
    assert_eq!(claims.while_idle(|| ()), Err(ResetError { claimed: 1 }));
    claims.claim(CoreId(0)).expect("the refused reset let go");
    claims.release(CoreId(0));
    claims.release(CoreId(1));
    assert_eq!(claims.while_idle(|| 5), Ok(5));
    let none = ClaimError::NoSuchCore {
        core: CoreId(2),
        cores: 2,
    };
    assert_eq!(claims.claim(CoreId(2)), Err(none));
    assert!(Claims::new(0).is_err() && Claims::new(MAX_CORES + 1).is_err());
}
