//! Pulls that work, the layout they leave, and what is found in it.

use super::*;

#[test]
fn a_pulled_model_lies_in_the_shared_layout_and_is_found_offline() {
    let body = content(1);
    let repository = Repository::new(&[("g-Q4_K_M.gguf", &body), ("README.md", b"hello")]);
    let server = Server::start(move |request| repository.answer(request));
    let mut setup = Setup::new(&server.base());
    let pulled = setup.pull("o/r").unwrap();

    assert_eq!(
        pulled.path,
        setup
            .repo()
            .join(format!("snapshots/{COMMIT}/g-Q4_K_M.gguf"))
    );
    assert_eq!(pulled.commit.as_str(), COMMIT);
    assert_eq!(pulled.received_bytes, body.len() as u64);
    assert_eq!(fs::read(&pulled.path).unwrap(), body);
    assert_eq!(
        fs::read_link(&pulled.path).unwrap(),
        PathBuf::from(format!("../../blobs/{}", sha256(&body)))
    );
    assert_eq!(
        fs::read_to_string(setup.repo().join("refs/main")).unwrap(),
        COMMIT
    );
    assert_eq!(setup.blobs(), [sha256(&body)]);
    let resolve = format!("/o/r/resolve/{COMMIT}/g-Q4_K_M.gguf");
    assert_eq!(
        server.log(),
        [
            "GET /api/models/o/r/revision/main".to_owned(),
            format!("HEAD {resolve}"),
            format!("GET {resolve}"),
            "GET /cdn/g-Q4_K_M.gguf".to_owned(),
        ]
    );

    // Content that is there is not fetched again, though the revision is checked.
    assert_eq!(setup.pull("o/r").unwrap().received_bytes, 0);
    assert_eq!(server.log().len(), 6);

    setup.network = Network::Forbidden;
    let hub = setup.hub();
    for model in ["hf:o/r", "hf:o/r:q4_k_m", "hf:o/r:g-Q4_K_M.gguf"] {
        let found = hub.resolve(&model.parse().unwrap(), &mut quiet).unwrap();
        assert_eq!(found, pulled.path, "{model}");
    }
    let error = hub
        .resolve(&"hf:o/r:Q8_0".parse().unwrap(), &mut quiet)
        .unwrap_err();
    assert!(
        error.to_string().contains("ruled out by --offline"),
        "{error}"
    );
    assert_eq!(server.log().len(), 6);
}

#[test]
fn listing_the_cache_names_whole_models_once() {
    let (model, projector) = (content(1), content(2));
    let mut repository = Repository::new(&[("g-Q8_0.gguf", &model), ("mmproj-g.gguf", &projector)]);
    let first = repository.clone();
    let server = Server::start(move |request| first.answer(request));
    let mut setup = Setup::new(&server.base());
    assert!(setup.hub().cached(None).unwrap().is_empty());
    setup.pull("o/r").unwrap();
    setup.pull("o/r:mmproj-g.gguf").unwrap();

    // A later revision in which only one file was pulled again.
    repository.commit = "b".repeat(40);
    let server = Server::start(move |request| repository.answer(request));
    setup.base = server.base();
    setup.pull("o/r").unwrap();

    let hub = setup.hub();
    for models in [
        hub.cached(None).unwrap(),
        hub.cached(Some(&"o/r".parse().unwrap())).unwrap(),
    ] {
        let summary: Vec<_> = models
            .iter()
            .map(|m| {
                (
                    m.repo.to_string(),
                    m.file.as_str(),
                    m.role,
                    m.part_count,
                    m.size_bytes,
                    &m.commit.as_str()[..1],
                )
            })
            .collect();
        let size = model.len() as u64;
        assert_eq!(
            summary,
            [
                ("o/r".to_owned(), "g-Q8_0.gguf", Role::Model, 1, size, "b"),
                (
                    "o/r".to_owned(),
                    "mmproj-g.gguf",
                    Role::Projector,
                    1,
                    size,
                    "a"
                ),
            ]
        );
        assert!(models.iter().all(|model| model.path.is_file()));
    }
    assert!(
        hub.cached(Some(&"o/other".parse().unwrap()))
            .unwrap()
            .is_empty()
    );
    // Still found offline, in the revision that has it.
    let found = hub
        .find_cached(&"hf:o/r:mmproj-g.gguf".parse().unwrap())
        .unwrap()
        .unwrap();
    assert!(found.starts_with(setup.repo().join(format!("snapshots/{COMMIT}"))));
}

#[test]
fn a_local_path_is_taken_as_it_is() {
    let setup = Setup::new("http://127.0.0.1:1");
    let file = setup.root.path().join("x.gguf");
    fs::write(&file, "x").unwrap();
    let hub = setup.hub();
    assert_eq!(
        hub.resolve(&ModelRef::Path(file.clone()), &mut quiet)
            .unwrap(),
        file
    );
    let error = hub
        .resolve(&"no-owner/no-file".parse().unwrap(), &mut quiet)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no file no-owner/no-file; for the model of that name on the hub, write hf:no-owner/no-file"
    );
}

#[test]
fn all_parts_of_a_split_model_are_fetched() {
    let bodies = [content(1), content(2), content(3)];
    let repository = Repository::new(&[
        ("BF16/g-00001-of-00003.gguf", &bodies[0]),
        ("BF16/g-00002-of-00003.gguf", &bodies[1]),
        ("BF16/g-00003-of-00003.gguf", &bodies[2]),
        ("g-Q8_0.gguf", b"not wanted"),
    ]);
    let server = Server::start(move |request| repository.answer(request));
    let setup = Setup::new(&server.base());
    let pulled = setup.pull("o/r:bf16").unwrap();
    assert!(pulled.path.ends_with("BF16/g-00001-of-00003.gguf"));
    for (index, body) in bodies.iter().enumerate() {
        let part = pulled
            .path
            .with_file_name(format!("g-{:05}-of-00003.gguf", index + 1));
        assert!(fs::read(part).unwrap() == *body, "part {index}");
    }
    let hub = setup.hub();
    let model = "hf:o/r:bf16".parse().unwrap();
    assert_eq!(hub.find_cached(&model).unwrap(), Some(pulled.path.clone()));
    assert_eq!(hub.cached(None).unwrap()[0].part_count, 3);
    // With a part gone the model is no longer there.
    fs::remove_file(pulled.path.with_file_name("g-00002-of-00003.gguf")).unwrap();
    assert_eq!(hub.find_cached(&model).unwrap(), None);
}

#[test]
fn small_files_without_a_digest_are_known_by_size() {
    let server = Server::start(|request| {
        let git_hash = "c".repeat(40);
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/api/models/o/r/revision/main") => Reply::status(200).body(format!(
                r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"vocab only.gguf"}}]}}"#
            )),
            (_, path) if path.ends_with("/vocab%20only.gguf") => Reply::status(200)
                .with("ETag", format!("W/\"{git_hash}\""))
                .body("tiny"),
            _ => Reply::status(404),
        }
    });
    let setup = Setup::new(&server.base());
    let pulled = setup.pull("o/r").unwrap();
    assert_eq!(fs::read_to_string(pulled.path).unwrap(), "tiny");
    assert_eq!(setup.blobs(), ["c".repeat(40)]);
}

#[test]
fn a_renamed_repository_is_followed() {
    let repository = Repository::new(&[("g.gguf", b"content")]);
    let server =
        Server::start(
            move |request| match request.path.replacen("/old/name", "/o/r", 1) {
                path if path != request.path => Reply::status(307).with("Location", path),
                _ => repository.answer(request),
            },
        );
    let setup = Setup::new(&server.base());
    let pulled = setup.pull("old/name").unwrap();
    assert_eq!(fs::read_to_string(&pulled.path).unwrap(), "content");
    assert!(
        pulled
            .path
            .starts_with(setup.root.path().join("models--old--name"))
    );
}

#[test]
fn two_pulls_at_once_fetch_the_content_once() {
    let body = content(1);
    let repository = Repository::new(&[("g.gguf", &body)]);
    // Both have described the file, so both want it, before either may fetch it.
    let (described, both) = (Mutex::new(0), Condvar::new());
    let server = Server::start(move |request| {
        if request.method == "HEAD" {
            let mut count = described.lock().unwrap();
            *count += 1;
            both.notify_all();
            let patience = Duration::from_mins(2);
            drop(both.wait_timeout_while(count, patience, |count| *count < 2));
        }
        repository.answer(request)
    });
    let setup = Arc::new(Setup::new(&server.base()));
    let pulls = [(); 2].map(|()| {
        let setup = Arc::clone(&setup);
        std::thread::spawn(move || setup.pull("o/r").unwrap())
    });
    let pulled = pulls.map(|pull| pull.join().unwrap());
    assert_eq!(
        pulled[0].received_bytes + pulled[1].received_bytes,
        body.len() as u64
    );
    assert_eq!(pulled[0].path, pulled[1].path);
    assert!(fs::read(&pulled[0].path).unwrap() == body);
    assert_eq!(
        server
            .log()
            .iter()
            .filter(|line| line.contains("/cdn"))
            .count(),
        1
    );
    assert_eq!(setup.blobs(), [sha256(&body)]);
}

#[test]
fn a_pull_waits_for_another_process_and_can_be_stopped_meanwhile() {
    let body = content(1);
    let server = Server::start(breaking(&body, 0, 0));
    let setup = Setup::new(&server.base());
    let cache = Cache::new(setup.root.path().to_owned()).repo(&"o/r".parse().unwrap());
    cache.prepare().unwrap();
    let etag = names::Etag::from_header(&sha256(&body)).unwrap();
    let _held = cache.try_lock(&etag).unwrap().unwrap();
    let mut waits = 0;
    let error = setup.hub().pull(&"o/r".parse().unwrap(), &mut |progress| {
        assert_eq!(progress, Progress::Waiting { file: "g.gguf" });
        waits += 1;
        if waits == 3 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    assert!(error.unwrap_err().to_string().contains("was stopped"));
    assert!(setup.blobs().is_empty());
}

#[test]
fn what_is_removed_leaves_content_that_another_name_shows() {
    let body = content(1);
    let repository = Repository::new(&[("g-Q4_0.gguf", &body), ("h-Q8_0.gguf", &body)]);
    let server = Server::start(move |request| repository.answer(request));
    let setup = Setup::new(&server.base());
    let kept = setup.pull("o/r:Q8_0").unwrap().path;
    setup.pull("o/r:Q4_0").unwrap();
    assert_eq!(setup.blobs().len(), 1, "same content");

    let removed = setup.hub().remove(&"o/r:Q4_0".parse().unwrap()).unwrap();
    assert_eq!((removed.names.len(), removed.freed_bytes), (1, 0));
    assert_eq!(fs::read(&kept).unwrap(), body);

    let removed = setup.hub().remove(&"o/r:Q8_0".parse().unwrap()).unwrap();
    assert_eq!(removed.freed_bytes, body.len() as u64);
    assert!(setup.blobs().is_empty() && !kept.exists());
    assert!(setup.hub().cached(None).unwrap().is_empty());
    assert!(setup.hub().remove(&"o/r:Q8_0".parse().unwrap()).is_err());
}

#[test]
fn nothing_is_removed_where_it_is_not_clear_what() {
    let (one, other) = (content(1), content(2));
    let repository = Repository::new(&[("g-Q6_K.gguf", &one), ("g-Q5_K.gguf", &other)]);
    let server = Server::start(move |request| repository.answer(request));
    let setup = Setup::new(&server.base());
    setup.pull("o/r:Q6_K").unwrap();
    setup.pull("o/r:Q5_K").unwrap();
    let error = setup.hub().remove(&"o/r".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("Q6_K"), "{error}");
    assert_eq!(setup.blobs().len(), 2);
}

/// A link that leads out of the cache, by whoever's hand, is taken away and what it shows is not.
#[test]
fn what_lies_outside_the_cache_is_left_alone() {
    let body = content(1);
    let repository = Repository::new(&[("g-Q4_0.gguf", &body)]);
    let server = Server::start(move |request| repository.answer(request));
    let setup = Setup::new(&server.base());
    let path = setup.pull("o/r").unwrap().path;
    let outside = setup.root.path().join("mine.gguf");
    fs::write(&outside, &body).unwrap();
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&outside, &path).unwrap();
    let removed = setup.hub().remove(&"o/r".parse().unwrap()).unwrap();
    assert_eq!(removed.freed_bytes, 0);
    assert!(outside.exists() && !path.exists());
}
