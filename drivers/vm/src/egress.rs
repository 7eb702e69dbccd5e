//! Egress policies, between the words of a spec and those of the network.

use torpor_netpool::{AllowRule, Egress, EgressError, PoolConfig};
use torpor_sandbox::{DriverError, SandboxSpec};

/// The policy of a spec, as the network takes it.
///
/// # Errors
/// A rule that can't be read (it is named), or too many.
pub fn to_pool(egress: &torpor_sandbox::Egress) -> Result<Egress, EgressError> {
    let policy = match egress {
        torpor_sandbox::Egress::Open => Egress::Open,
        torpor_sandbox::Egress::Public => Egress::Public,
        torpor_sandbox::Egress::None => Egress::None,
        torpor_sandbox::Egress::Allow { rules, names } => {
            let rules: Result<Vec<AllowRule>, EgressError> = rules.iter().map(|rule| rule.parse()).collect();
            Egress::Allow { rules: rules?, names: *names }
        }
    };
    policy.validate()?;
    Ok(policy)
}

/// The same in the words of a spec; rules in their usual form.
pub fn from_pool(egress: &Egress) -> torpor_sandbox::Egress {
    match egress {
        Egress::Open => torpor_sandbox::Egress::Open,
        Egress::Public => torpor_sandbox::Egress::Public,
        Egress::None => torpor_sandbox::Egress::None,
        Egress::Allow { rules, names } => torpor_sandbox::Egress::Allow {
            rules: rules.iter().map(ToString::to_string).collect(),
            names: *names,
        },
    }
}

/// The policy of a sandbox: its own, or the pool's.
pub(crate) fn of_spec(pool: &PoolConfig, spec: &SandboxSpec) -> Result<Egress, DriverError> {
    match &spec.egress {
        Some(own) => to_pool(own).map_err(|error| DriverError::Invalid(format!("egress: {error}"))),
        None => Ok(pool.egress.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_the_same_in_both_words_and_a_bad_rule_is_named() {
        let allow = |rules: &[&str]| torpor_sandbox::Egress::Allow {
            rules: rules.iter().map(ToString::to_string).collect(),
            names: true,
        };
        let usual = from_pool(&to_pool(&allow(&["192.0.2.7:443", "10.0.0.0/8"])).unwrap());
        assert_eq!(usual, allow(&["192.0.2.7/32:443/tcp", "10.0.0.0/8"]));
        for policy in
            [torpor_sandbox::Egress::Open, torpor_sandbox::Egress::Public, torpor_sandbox::Egress::None]
        {
            assert_eq!(from_pool(&to_pool(&policy).unwrap()), policy);
        }
        let error = to_pool(&allow(&["192.0.2.0/24", "192.0.2.7:http"])).unwrap_err().to_string();
        assert!(error.contains("\"192.0.2.7:http\""), "{error}");
        // What is kept in spec.json is what the network's own policies look like.
        let (ours, theirs) = (serde_json::to_string(&usual).unwrap(), to_pool(&usual).unwrap());
        assert_eq!(serde_json::from_str::<Egress>(&ours).unwrap(), theirs);
    }
}
