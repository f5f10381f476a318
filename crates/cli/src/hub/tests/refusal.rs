//! Servers that refuse, are away, or mean harm.

use super::*;

#[test]
fn refusals_say_what_to_do() {
    let error_for = |status: u16, code: Option<&'static str>, token: Option<&str>| {
        let server = Server::start(move |_| match code {
            Some(code) => Reply::status(status).with("X-Error-Code", code),
            None => Reply::status(status),
        });
        let mut setup = Setup::new(&server.base());
        setup.token = token.map(str::to_owned);
        setup.pull_error("o/r").replace(&server.base(), "HUB")
    };
    let error = error_for(401, None, None);
    assert!(
        error.starts_with("HUB refused access to hf:o/r (401 Unauthorized)"),
        "{error}"
    );
    assert!(
        error.ends_with("accept the licence at HUB/o/r and set HF_TOKEN"),
        "{error}"
    );
    let error = error_for(401, None, Some("hf_old"));
    assert!(error.contains("whether HF_TOKEN is still valid"), "{error}");
    assert!(!error.contains("hf_old"), "{error}");
    for (status, code) in [(401, Some("GatedRepo")), (403, None)] {
        let error = error_for(status, code, Some("hf_good"));
        assert!(error.starts_with("hf:o/r is gated"), "{error}");
        assert!(
            error.contains("accept its licence at HUB/o/r, then set HF_TOKEN"),
            "{error}"
        );
    }
    let error = error_for(404, None, None);
    assert_eq!(
        error,
        "hf:o/r was not found on HUB (404 Not Found); check the name at HUB/o/r"
    );
}

#[test]
fn an_unknown_file_is_answered_with_the_known_ones() {
    let repository = Repository::new(&[("g-Q6_K.gguf", b"1"), ("g-Q5_K_M.gguf", b"2")]);
    let server = Server::start(move |request| repository.answer(request));
    let setup = Setup::new(&server.base());
    assert_eq!(
        setup.pull_error("o/r:x.gguf"),
        "hf:o/r has no file x.gguf; it has g-Q5_K_M.gguf, g-Q6_K.gguf"
    );
}

#[test]
fn being_offline_is_one_sentence_with_a_way_out() {
    // Bound and released: nobody listens there.
    let address = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let setup = Setup::new(&format!("http://{address}"));
    let error = setup.pull_error("o/r");
    assert!(
        error.starts_with(&format!(
            "could not reach http://{address} (Connection refused"
        )),
        "{error}"
    );
    assert!(
        error.contains("this machine seems to be offline"),
        "{error}"
    );
    assert!(
        error.contains("pass its path with -m, or set HF_HUB_CACHE"),
        "{error}"
    );
    assert!(error.ends_with("already holds hf:o/r"), "{error}");
}

#[test]
fn a_busy_server_is_asked_again_a_few_times() {
    for (busy, works) in [(3, true), (4, false)] {
        let repository = Repository::new(&[("g.gguf", b"content")]);
        let asked = AtomicUsize::new(0);
        let server = Server::start(move |request| match asked.fetch_add(1, Ordering::SeqCst) {
            count if count < busy => {
                Reply::status([429, 503, 500, 502][count]).with("Retry-After", "0")
            }
            _ => repository.answer(request),
        });
        let setup = Setup::new(&server.base());
        if works {
            setup.pull("o/r").unwrap();
        } else {
            let error = setup.pull_error("o/r");
            assert!(
                error.contains("answered 502 Bad Gateway, 4 times in a row"),
                "{error}"
            );
        }
    }
}

#[test]
fn hostile_names_never_reach_the_disk() {
    let listing = |name: &'static str, sha: &'static str| {
        move |_: &Request| {
            let model = serde_json::json!({ "sha": sha, "siblings": [{ "rfilename": name }] });
            Reply::status(200).body(model.to_string())
        }
    };
    let errors: Vec<_> = [
        ("../../evil.gguf", COMMIT),
        ("/tmp/evil.gguf", COMMIT),
        ("a\\..\\evil.gguf", COMMIT),
        ("a/../../../evil.gguf", COMMIT),
        ("good.gguf", "../../../../evil"),
    ]
    .into_iter()
    .map(|(name, sha)| {
        let server = Server::start(listing(name, sha));
        let setup = Setup::new(&server.base());
        let error = setup.pull_error("o/r");
        assert!(names_in(setup.root.path()).is_empty());
        error
    })
    .collect();
    assert!(
        errors[..4].iter().all(|error| error.contains("is unsafe")),
        "{errors:?}"
    );
    assert!(errors[4].contains("is not a commit"), "{errors:?}");

    let repository = Repository::new(&[("g.gguf", b"content")]);
    let server = Server::start(move |request| {
        let mut reply = repository.answer(request);
        for (name, value) in &mut reply.headers {
            if *name == "X-Linked-Etag" {
                *value = "\"../../../evil\"".to_owned();
            }
        }
        reply
    });
    let setup = Setup::new(&server.base());
    let error = setup.pull_error("o/r");
    assert!(error.contains("unusable ETag"), "{error}");
    assert!(names_in(setup.root.path()).is_empty());
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let body = content(1);
    let mut repository = Repository::new(&[("g.gguf", &body)]);
    let cdn = Server::start({
        let repository = repository.clone();
        move |request| repository.answer(request)
    });
    repository.cdn = Some(cdn.base());
    let hub = Server::start(move |request| repository.answer(request));
    let mut setup = Setup::new(&hub.base());
    setup.token = Some("hf_secret".to_owned());
    setup.pull("o/r").unwrap();
    let authorizations = |server: &Server| -> Vec<_> {
        let requests = server.requests();
        requests
            .iter()
            .map(|request| request.header("authorization").map(str::to_owned))
            .collect()
    };
    assert_eq!(
        authorizations(&hub),
        vec![Some("Bearer hf_secret".to_owned()); 3]
    );
    assert_eq!(authorizations(&cdn), [None]);
}

#[test]
fn redirects_are_bounded_and_stay_off_plain_http() {
    let server =
        Server::start(|request| Reply::status(302).with("Location", request.path.as_str()));
    let error = Setup::new(&server.base()).pull_error("o/r");
    assert!(error.contains("redirects in circles"), "{error}");
    let server = Server::start(|_| Reply::status(302).with("Location", "http://192.0.2.1/x"));
    let error = Setup::new(&server.base()).pull_error("o/r");
    assert!(
        error.contains("redirects to http://192.0.2.1, which is not https"),
        "{error}"
    );
}
