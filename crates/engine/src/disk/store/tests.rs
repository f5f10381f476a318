use std::time::Instant;

use super::{
    super::{
        segment::tests::{namespace, segment},
        testing::FakeFiles,
    },
    *,
};
use crate::core::StoredBlock;

const PAGE: usize = 100;

fn page_bytes() -> PerGroup<usize> {
    PerGroup {
        full: PAGE,
        sliding: PAGE,
    }
}

fn open(files: &FakeFiles, max_bytes: u64) -> DiskStore {
    DiskStore::with_files(files.clone(), namespace(1), page_bytes(), max_bytes, true).unwrap()
}

fn wanted(blocks: &[StoredBlock]) -> Vec<WantedPage> {
    let wanted = blocks.iter().map(|block| WantedPage {
        group: KvGroup::Full,
        block: block.clone(),
    });
    wanted.collect()
}

/// The bytes of each page, as they are read.
fn read(store: &mut DiskStore, blocks: &[StoredBlock]) -> Vec<Option<Vec<u8>>> {
    let id = store.read(wanted(blocks));
    let begun = Instant::now();
    loop {
        if let Some(read) = store.finished(Duration::from_millis(20)) {
            assert_eq!(read.id, id);
            let pages = read.pages.iter();
            return pages
                .map(|p| p.as_ref().map(|p| p.bytes().to_vec()))
                .collect();
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "nothing is read");
    }
}

/// Writes segments in a session of their own.
fn written(files: &FakeFiles, segments: &[Segment]) {
    let mut store = open(files, 1 << 20);
    for segment in segments {
        assert!(store.takes_more());
        store.write(segment.clone());
    }
}

fn pages(segment: &Segment) -> Vec<Option<Vec<u8>>> {
    segment
        .pages
        .chunks(PAGE)
        .map(|p| Some(p.to_vec()))
        .collect()
}

#[test]
fn what_was_written_is_there_at_once_and_after_a_restart() {
    let files = FakeFiles::default();
    let (one, two) = (segment(1, 3, PAGE), segment(1000, 2, PAGE));
    let mut store = open(&files, 1 << 20);
    store.write(one.clone());
    assert!(store.has(KvGroup::Full, &one.blocks[2].chain));
    assert!(!store.has(KvGroup::Sliding, &one.blocks[2].chain));
    assert_eq!(read(&mut store, &one.blocks), pages(&one));
    store.write(two.clone());
    drop(store);
    let mut store = open(&files, 1 << 20);
    assert_eq!(read(&mut store, &one.blocks[1..]), pages(&one)[1..]);
    assert_eq!(read(&mut store, &two.blocks), pages(&two));
    assert_eq!((store.stats().pages_read, store.stats().refused), (4, 0));
}

#[test]
fn a_file_with_any_byte_changed_is_refused_and_removed() {
    let whole = segment(1, 2, PAGE);
    let files = FakeFiles::default();
    written(&files, std::slice::from_ref(&whole));
    let (name, bytes) = files.with(|disk| {
        let (name, (bytes, _)) = disk.files.first_key_value().unwrap();
        (name.clone(), bytes.clone())
    });
    for place in (0..bytes.len()).step_by(7) {
        let mut damaged = bytes.clone();
        damaged[place] ^= 1 << (place % 8);
        // Found at the start, or later, when somebody wants its pages.
        for late in [false, true] {
            let files = FakeFiles::default();
            let put = |bytes: &[u8]| {
                files.with(|disk| disk.files.insert(name.clone(), (bytes.to_vec(), None)));
            };
            put(if late { &bytes } else { &damaged });
            let mut store = open(&files, 1 << 20);
            if late {
                put(&damaged);
            }
            let read = read(&mut store, &whole.blocks);
            assert!(read.iter().all(Option::is_none), "byte {place} is believed");
            assert_eq!(store.stats().refused, 1);
            assert!(!store.has(KvGroup::Full, &whole.blocks[0].chain));
            drop(store);
            assert!(files.with(|disk| disk.files.is_empty()));
        }
    }
}

#[test]
fn files_that_are_cut_short_gone_or_another_models_are_missing_pages() {
    let whole = segment(1, 2, PAGE);
    let files = FakeFiles::default();
    written(&files, std::slice::from_ref(&whole));
    let name = files.with(|disk| disk.files.first_key_value().unwrap().0.clone());
    let mut store = open(&files, 1 << 20);
    files.with(|disk| disk.files.get_mut(&name).unwrap().0.truncate(300));
    assert_eq!(read(&mut store, &whole.blocks), [None, None]);
    drop(store);
    written(&files, std::slice::from_ref(&whole));
    let mut store = open(&files, 1 << 20);
    files.with(|disk| disk.files.clear());
    assert_eq!(read(&mut store, &whole.blocks), [None, None]);
    drop(store);
    written(&files, std::slice::from_ref(&whole));
    let foreign = DiskStore::with_files(files.clone(), namespace(2), page_bytes(), 1 << 20, true);
    assert!(!foreign.unwrap().has(KvGroup::Full, &whole.blocks[0].chain));
}

#[test]
fn a_file_under_another_ones_name_is_refused() {
    let (one, two) = (segment(1, 2, PAGE), segment(1000, 2, PAGE));
    let files = FakeFiles::default();
    written(&files, &[one.clone(), two.clone()]);
    let mut store = open(&files, 1 << 20);
    files.with(|disk| {
        let names: Vec<String> = disk.files.keys().cloned().collect();
        let contents = disk.files[&names[0]].clone();
        disk.files.insert(names[1].clone(), contents);
    });
    let found = [read(&mut store, &one.blocks), read(&mut store, &two.blocks)];
    let right = [pages(&one), pages(&two)];
    let missing = vec![None, None];
    assert!(found == [right[0].clone(), missing.clone()] || found == [missing, right[1].clone()]);
}

#[test]
fn what_was_used_longest_ago_is_removed_first() {
    let files = FakeFiles::default();
    let segments: Vec<Segment> = (0..3).map(|n| segment(1000 * n, 2, PAGE)).collect();
    let size = segment::file_bytes(&segments[0]);
    let mut store = open(&files, 2 * size);
    store.write(segments[0].clone());
    store.write(segments[1].clone());
    read(&mut store, &segments[0].blocks);
    store.write(segments[2].clone());
    let has = |store: &DiskStore| -> Vec<bool> {
        let all = segments.iter();
        all.map(|s| store.has(KvGroup::Full, &s.blocks[0].chain))
            .collect()
    };
    assert_eq!(has(&store), [true, false, true]);
    assert_eq!(store.stats().bytes, 2 * size);
    drop(store);
    assert_eq!(files.with(|disk| disk.files.len()), 2);
    // With less room than before, too.
    let store = open(&files, size);
    assert_eq!(has(&store).iter().filter(|has| **has).count(), 1);
}

#[test]
fn a_full_disk_ends_the_writing_alone() {
    let files = FakeFiles::default();
    let (one, two) = (segment(1, 2, PAGE), segment(1000, 2, PAGE));
    let mut store = open(&files, 1 << 20);
    store.write(one.clone());
    read(&mut store, &one.blocks);
    files.with(|disk| disk.room = Some(0));
    store.write(two.clone());
    assert_eq!(read(&mut store, &two.blocks), [None, None]);
    assert!(!store.takes_more() && !store.writes());
    assert_eq!(read(&mut store, &one.blocks), pages(&one));
}

#[test]
fn reading_is_worth_it_where_it_is_faster() {
    let mut store = open(&FakeFiles::default(), 1 << 20);
    assert!(store.is_worth(1, 1 << 40), "nobody knows yet");
    store.observe(1000, Duration::from_secs(1));
    // A second of computing against 0.6 or 1.2 of reading, with the margin.
    assert!(store.is_worth(1000, 500_000_000));
    assert!(!store.is_worth(1000, 1_000_000_000));
}

#[test]
fn a_folder_is_one_processes_to_write_and_everybodys_to_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let open = || DiskStore::open(&path, namespace(1), page_bytes(), 1 << 20).unwrap();
    let mut first = open();
    let one = segment(1, 2, PAGE);
    first.write(one.clone());
    assert_eq!(read(&mut first, &one.blocks), pages(&one));
    let mut second = open();
    assert!(first.writes() && !second.writes());
    assert_eq!(read(&mut second, &one.blocks), pages(&one));
    drop(first);
    drop(second);
    assert!(open().writes());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let own = path.join(namespace(1).name());
        assert_eq!((mode(&path), mode(&own)), (0o700, 0o700));
        for file in std::fs::read_dir(&own).unwrap() {
            assert_eq!(mode(&file.unwrap().path()), 0o600);
        }
    }
}

#[test]
fn a_page_of_the_other_group_is_not_taken_for_one_of_this() {
    let files = FakeFiles::default();
    let full = segment(1, 2, PAGE);
    let sliding = Segment {
        group: KvGroup::Sliding,
        ..full.clone()
    };
    written(&files, &[full.clone(), sliding]);
    let mut store = open(&files, 1 << 20);
    files.with(|disk| {
        let names: Vec<String> = disk.files.keys().cloned().collect();
        let [full, sliding] = names.as_slice() else {
            panic!("{names:?}")
        };
        let contents = disk.files[sliding].clone();
        disk.files.insert(full.clone(), contents);
    });
    assert_eq!(read(&mut store, &full.blocks), [None, None]);
}

#[test]
fn nobody_waits_for_a_thread_that_is_gone() {
    let files = FakeFiles::default();
    let one = segment(1, 2, PAGE);
    let mut store = open(&files, 1 << 20);
    store.write(one.clone());
    files.with(|disk| disk.panics = true);
    assert_eq!(read(&mut store, &one.blocks), [None, None]);
    assert!(!store.writes() && !store.has(KvGroup::Full, &one.blocks[0].chain));
}
