//! Transfers that break off, and what must not survive them.

use super::*;

#[test]
fn a_cut_connection_is_resumed_within_one_pull() {
    let body = content(1);
    let server = Server::start(breaking(&body, 2, 700_000));
    let setup = Setup::new(&server.base());
    let mut retries = 0;
    let mut last = 0;
    let pulled = setup
        .hub()
        .pull(&"o/r".parse().unwrap(), &mut |progress| {
            match progress {
                Progress::Retrying { reason, .. } => {
                    assert!(reason.contains("broke off"), "{reason}");
                    retries += 1;
                }
                Progress::Receiving { file, done, total } => {
                    assert_eq!((file, total), ("g.gguf", 2_500_000));
                    assert!(done >= last);
                    last = done;
                }
                other => panic!("{other:?}"),
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert!(fs::read(pulled.path).unwrap() == body);
    assert_eq!((retries, last), (2, 2_500_000));
    let content: Vec<_> = server
        .log()
        .into_iter()
        .filter(|line| line.contains("/cdn"))
        .collect();
    assert_eq!(
        content,
        [
            "GET /cdn/g.gguf",
            "GET /cdn/g.gguf@700000",
            "GET /cdn/g.gguf@1400000"
        ]
    );
}

#[test]
fn an_interrupted_pull_is_resumed_by_the_next() {
    let body = content(1);
    let server = Server::start(breaking(&body, 1, 700_000));
    let mut setup = Setup::new(&server.base());
    setup.attempts = 1;
    let error = setup.pull_error("o/r");
    assert!(
        error.contains("broke off at 700.00 kB of 2.50 MB")
            && error.ends_with("the same command resumes it"),
        "{error}"
    );
    assert_eq!(
        fs::metadata(setup.incomplete(&body)).unwrap().len(),
        700_000
    );
    assert!(!setup.repo().join("snapshots").exists() && !setup.repo().join("refs").exists());
    assert!(setup.hub().cached(None).unwrap().is_empty());

    let pulled = setup.pull("o/r").unwrap();
    assert_eq!(pulled.received_bytes, 1_800_000);
    assert!(fs::read(pulled.path).unwrap() == body);
    assert!(server.log().contains(&"GET /cdn/g.gguf@700000".to_owned()));
    assert_eq!(setup.blobs(), [sha256(&body)]);
}

#[test]
fn a_stopped_pull_stays_resumable() {
    let body = content(1);
    let server = Server::start(breaking(&body, 0, 0));
    let setup = Setup::new(&server.base());
    let mut stop = |progress: Progress<'_>| match progress {
        Progress::Receiving { done, .. } if done > 0 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let error = setup
        .hub()
        .pull(&"o/r".parse().unwrap(), &mut stop)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the download was stopped; the same command resumes it"
    );
    let kept = fs::metadata(setup.incomplete(&body)).unwrap().len();
    assert!(kept > 0 && kept < body.len() as u64);
    let pulled = setup.pull("o/r").unwrap();
    assert_eq!(pulled.received_bytes, body.len() as u64 - kept);
    assert!(fs::read(pulled.path).unwrap() == body);
}

#[test]
fn a_server_without_ranges_starts_over() {
    let body = content(1);
    let whole = body.clone();
    let repository = Repository::new(&[("g.gguf", &body)]);
    let server = Server::start(move |request| match request.path.as_str() {
        "/cdn/g.gguf" => Reply::status(200).body(whole.as_slice()),
        _ => repository.answer(request),
    });
    let setup = Setup::new(&server.base());
    fs::create_dir_all(setup.repo().join("blobs")).unwrap();
    fs::write(setup.incomplete(&body), &body[..1_000_000]).unwrap();
    let pulled = setup.pull("o/r").unwrap();
    assert!(server.log().contains(&"GET /cdn/g.gguf@1000000".to_owned()));
    assert_eq!(pulled.received_bytes, body.len() as u64);
    assert!(fs::read(pulled.path).unwrap() == body);
}

#[test]
fn a_partial_file_longer_than_the_content_is_started_over() {
    let body = content(1);
    let server = Server::start(breaking(&body, 0, 0));
    let setup = Setup::new(&server.base());
    fs::create_dir_all(setup.repo().join("blobs")).unwrap();
    fs::write(setup.incomplete(&body), vec![0; body.len() + 1]).unwrap();
    assert!(fs::read(setup.pull("o/r").unwrap().path).unwrap() == body);
}

#[test]
fn damaged_content_is_removed_and_reported() {
    let body = content(1);
    let mut damaged = body.clone();
    damaged[1_234_567] ^= 1;
    let repository = Repository::new(&[("g.gguf", &body)]);
    let server = Server::start(move |request| match request.path.as_str() {
        "/cdn/g.gguf" => Reply::status(200).body(damaged.as_slice()),
        _ => repository.answer(request),
    });
    let setup = Setup::new(&server.base());
    let error = setup.pull_error("o/r");
    assert!(
        error.starts_with("the content of g.gguf is damaged: its SHA-256 is ")
            && error.contains(&sha256(&body))
            && error.contains("the download was removed"),
        "{error}"
    );
    assert!(setup.blobs().is_empty());
    assert!(!setup.repo().join("snapshots").exists());
}

#[test]
fn more_content_than_announced_is_refused() {
    let body = content(1);
    let longer = [body.as_slice(), b"!"].concat();
    let repository = Repository::new(&[("g.gguf", &body)]);
    let server = Server::start(move |request| match request.path.as_str() {
        "/cdn/g.gguf" => Reply::status(200).body(longer.as_slice()),
        _ => repository.answer(request),
    });
    let setup = Setup::new(&server.base());
    let error = setup.pull_error("o/r");
    assert!(
        error.contains("sent more of g.gguf than the 2.50 MB it announced"),
        "{error}"
    );
    assert!(setup.blobs().is_empty());
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_removes_the_partial_file_and_says_what_is_needed() {
    let body = content(1);
    let server = Server::start(breaking(&body, 0, 0));
    let setup = Setup::new(&server.base());
    fs::create_dir_all(setup.repo().join("blobs")).unwrap();
    // Every write to this device fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", setup.incomplete(&body)).unwrap();
    let error = setup.pull_error("o/r");
    assert!(
        error.starts_with("the disk is full: g.gguf needs 2.50 MB and ")
            && error.contains("are free; the partial download was removed, free some space")
            && error.contains("HF_HUB_CACHE")
            && error.ends_with("then run the same command again"),
        "{error}"
    );
    assert!(setup.blobs().is_empty());
}

#[test]
fn a_download_that_cannot_fit_is_refused_before_it_starts() {
    let body = content(1);
    let repository = Repository::new(&[("g.gguf", &body)]);
    let server = Server::start(move |request| {
        let mut reply = repository.answer(request);
        for (name, value) in &mut reply.headers {
            if *name == "X-Linked-Size" {
                *value = (1_u64 << 60).to_string();
            }
        }
        reply
    });
    let setup = Setup::new(&server.base());
    let error = setup.pull_error("o/r");
    assert!(
        error.starts_with("not enough disk space: the download needs 1.15 EB and ")
            && error.contains("are free"),
        "{error}"
    );
    assert!(setup.blobs().is_empty());
    assert!(!server.log().iter().any(|line| line.contains("/cdn")));
}

#[test]
fn what_was_kept_is_checked_before_it_is_trusted() {
    let body = content(1);
    let server = Server::start(breaking(&body, 0, 0));
    let setup = Setup::new(&server.base());
    fs::create_dir_all(setup.repo().join("blobs")).unwrap();
    fs::write(setup.incomplete(&body), vec![0; 1_000_000]).unwrap();
    let mut checked = 0;
    let mut watch = |progress: Progress<'_>| {
        checked += usize::from(matches!(
            progress,
            Progress::Checking {
                total: 1_000_000,
                ..
            }
        ));
        ControlFlow::Continue(())
    };
    let error = setup
        .hub()
        .pull(&"o/r".parse().unwrap(), &mut watch)
        .unwrap_err();
    assert!(error.to_string().contains("is damaged"), "{error}");
    assert!(checked > 0 && setup.blobs().is_empty());
    assert!(fs::read(setup.pull("o/r").unwrap().path).unwrap() == body);
}

#[test]
fn content_that_only_lacks_its_name_is_not_fetched_again() {
    let body = content(1);
    let server = Server::start(breaking(&body, 0, 0));
    let setup = Setup::new(&server.base());
    fs::create_dir_all(setup.repo().join("blobs")).unwrap();
    fs::write(setup.incomplete(&body), &body).unwrap();
    let pulled = setup.pull("o/r").unwrap();
    assert_eq!(pulled.received_bytes, 0);
    assert!(fs::read(pulled.path).unwrap() == body);
    assert!(!server.log().iter().any(|line| line.contains("/cdn")));
}
