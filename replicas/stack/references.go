package stack

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/layer"
)

// namedByOthers returns the layers with a reference outside of one replica. The caller has the disk's lock.
func (d *Disk) namedByOthers(replica string) (map[string]bool, error) {
	all, ofReplicas, ofImages := d.readReferences()
	if err := errors.Join(ofReplicas, ofImages); err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, n := range all {
		if n.replica == replica {
			continue
		}
		for _, l := range n.layers {
			names[l] = true
		}
	}
	return names, nil
}

// referencedLayers returns the layers with a reference, and fails while a record is unreadable.
func (d *Disk) referencedLayers() (map[string]bool, error) {
	names, unread := d.namedReadable()
	if unread != nil {
		return nil, unread
	}
	return names, nil
}

// namedReadable returns the layers with a reference in a readable record; unread is the error of unreadable records.
func (d *Disk) namedReadable() (names map[string]bool, unread error) {
	seen := d.scanReferences()
	return namedBy(seen.all), seen.unreadableError()
}

func namedBy(all []*reference) map[string]bool {
	names := make(map[string]bool)
	for _, n := range all {
		for _, l := range n.layers {
			names[l] = true
		}
	}
	return names
}

// isNamed reports whether a layer has a reference, and fails if only an unreadable record may name the layer.
func (d *Disk) isNamed(uid string) (bool, error) {
	names, unread := d.namedReadable()
	if names[uid] {
		return true, nil
	}
	return false, unread
}

// reference is one record that names layers.
type reference struct {
	replica, volume string // of a replica's record
	image           string // of an image's record
	pin             string // of a pin
	layers          []string
}

// references caches the references of the disk by the identity of the record's file, because the removal of one of a
// thousand images needs the references of all others.
type references struct {
	mu    sync.Mutex
	known map[string]*knownReference // by path of the record
	seen  []*knownReference          // all references of the last scan

	syncedMu sync.Mutex
	synced   map[string]layer.FileID // identities of the record folders before their last sync

	wholeMu sync.Mutex
	whole   map[string]int64 // finished layers with checksums, and the length of the checksum file
}

// knownReference is a reference and the identity of its file.
type knownReference struct {
	reference
	path   string
	file   layer.FileID
	steady bool // an unchanged identity proves an unchanged record
	lasts  bool // the record, or a later one, is durable; guarded by syncedMu
}

// referenceScan is the result of a scan of all records.
type referenceScan struct {
	all                  []*reference
	records              []*knownReference // of all
	bare                 []string          // folders with a missing or unreadable record
	ofReplicas, ofImages error             // unreadable records
	unlisted             error             // a folder of records that could not be listed
}

// unreadableError returns the error of unreadable records, which may name more layers.
func (s *referenceScan) unreadableError() error { return errors.Join(s.ofReplicas, s.ofImages) }

// readReferences returns all references of the disk and the errors of unreadable records. The caller has the disk's
// lock.
func (d *Disk) readReferences() (all []*reference, ofReplicas, ofImages error) {
	s := d.scanReferences()
	return s.all, s.ofReplicas, s.ofImages
}

// scanReferences reads every record that names layers, from the cache if the file is unchanged.
func (d *Disk) scanReferences() *referenceScan {
	d.references.mu.Lock()
	defer d.references.mu.Unlock()
	was := d.references.known
	var replicas, images, pins referenceScan
	var wg sync.WaitGroup // two kinds at once: there may be thousands of each
	wg.Go(func() { replicas.ofReplicas = d.scanKind(&replicas, replicaDir, stackFile, was, d.replicaReference) })
	images.ofImages = d.scanKind(&images, imagesDir, imageFile, was, d.imageReference)
	wg.Wait()
	pins.ofReplicas = d.scanKind(&pins, pinsDir, pinFile, was, d.pinReference)
	s := &referenceScan{ofReplicas: errors.Join(replicas.ofReplicas, pins.ofReplicas), ofImages: images.ofImages,
		unlisted: errors.Join(replicas.unlisted, images.unlisted, pins.unlisted),
		records:  slices.Concat(replicas.records, images.records, pins.records),
		bare:     slices.Concat(replicas.bare, images.bare, pins.bare)}
	d.references.known = make(map[string]*knownReference, len(s.records))
	s.all = make([]*reference, 0, len(s.records))
	for _, k := range s.records {
		if s.all = append(s.all, &k.reference); k.steady {
			d.references.known[k.path] = k
		}
	}
	d.references.seen = s.records
	return s
}

// scanKind reads the records of one kind, and returns the errors of unreadable records.
func (d *Disk) scanKind(s *referenceScan, kind, record string, was map[string]*knownReference,
	read func(uid string) (reference, error)) (bad error) {
	entries, err := d.FS.ReadDir(d.Join(kind))
	if kind == pinsDir && errors.Is(err, fs.ErrNotExist) {
		return nil // made with the first of them
	}
	if err != nil {
		s.unlisted = err
		return fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	dir, skip := d.Join(kind)+"/", 0
	at, closeIt := d.OpenFolder(dir)
	defer closeIt()
	if at != unix.AT_FDCWD {
		skip = len(dir)
	}
	s.records = make([]*knownReference, 0, len(entries))
	for _, e := range entries {
		path := dir + e.Name() + "/" + record
		k := was[path]
		if k == nil && api.UID(e.Name()).Validate() != nil {
			continue
		}
		id, steady, err := d.FileIDAt(at, path[skip:])
		if k == nil || err != nil || k.file != id {
			n, err := read(e.Name())
			if err != nil {
				s.bare = append(s.bare, dir+e.Name())
			}
			if errors.Is(err, fs.ErrNotExist) {
				continue // half-made
			}
			if err != nil {
				bad = errors.Join(bad, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err)))
				continue
			}
			k = &knownReference{reference: n, path: path, file: id, steady: steady}
		}
		s.records = append(s.records, k)
	}
	return bad
}

// referencedByOthers reports for each layer whether another record than the replica's names the layer. Unchanged
// records of the last scan may answer without a new scan.
func (d *Disk) referencedByOthers(layers []string, replica string) (map[string]bool, error) {
	if shared := d.knownShared(layers, replica); len(shared) == len(layers) {
		return shared, nil
	}
	unlock, err := d.Lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	all, _, _ := d.readReferences() // what cannot be read is told elsewhere
	shared := map[string]bool{}
	for _, n := range all {
		if n.replica != replica {
			for _, l := range n.layers {
				shared[l] = true
			}
		}
	}
	return shared, nil
}

// knownShared returns the layers that a record of the last scan, other than the replica's, still names.
func (d *Disk) knownShared(layers []string, replica string) map[string]bool {
	d.references.mu.Lock()
	defer d.references.mu.Unlock()
	left := map[string]bool{}
	for _, l := range layers {
		left[l] = true
	}
	shared := map[string]bool{}
	for _, k := range d.references.seen {
		if k.replica == replica || !slices.ContainsFunc(k.layers, func(l string) bool { return left[l] }) {
			continue
		}
		for _, l := range d.referencedNow(k) {
			if left[l] {
				shared[l] = true
				delete(left, l)
			}
		}
	}
	return shared
}

// referencedNow returns the layers that a record names now.
func (d *Disk) referencedNow(k *knownReference) []string {
	if id, _, err := d.FileID(k.path); err == nil && k.steady && id == k.file {
		return k.layers
	}
	read, uid := d.pinReference, k.pin
	if k.replica != "" {
		read, uid = d.replicaReference, k.replica
	} else if k.image != "" {
		read, uid = d.imageReference, k.image
	}
	n, err := read(uid)
	if err != nil {
		return nil
	}
	return n.layers
}

func (d *Disk) imageReference(uid string) (reference, error) {
	img, err := d.readImage(uid)
	return reference{image: uid, layers: img.Layers}, err
}

func (d *Disk) replicaReference(uid string) (reference, error) {
	m, err := d.readStack(uid)
	if errors.Is(err, fs.ErrNotExist) {
		was, werr := d.headHoldsData(uid)
		switch {
		case werr != nil:
			err = werr
		case was:
			err = api.Errorf(api.Corrupt, "replica %s holds data, but its %s is missing", uid, stackFile)
		}
	}
	return reference{replica: uid, volume: m.Volume, layers: m.AllLayers()}, err
}

func (d *Disk) pinReference(uid string) (reference, error) {
	p, err := d.readPin(uid)
	return reference{pin: uid, volume: p.For, layers: p.Layers}, err
}
