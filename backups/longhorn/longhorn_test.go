package longhorn

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn/longhorntest"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/block"
)

const mib = 1 << 20

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newStore(t testing.TB) target.Store {
	t.Helper()
	s, err := folder.Open(t.Context(), t.TempDir())
	must(t, err)
	return s
}

// content is n bytes that compress to a third.
func content(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b[:n/3])
	return b
}

// memory is a sink.
type memory struct {
	mu     sync.Mutex
	bytes  []byte
	synced bool
	full   error
}

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full != nil {
		return 0, m.full
	}
	return copy(m.bytes[off:], p), nil
}

func (m *memory) ZeroAt(int64, int64) error { return nil }

func (m *memory) Sync(ctx context.Context) error {
	m.synced = true
	return ctx.Err()
}

// TestBackupsOfAllFormsAreRead: all compressions and sizes of blocks, a backup without both, blocks of zeros, holes, a
// short block at the end, and a block that has another compression than the cfg says.
func TestBackupsOfAllFormsAreRead(t *testing.T) {
	for name, b := range map[string]longhorntest.Backup{
		"none, 2 MiB":    {Method: "none", BlockSize: 2 * mib, Size: 12 * mib},
		"gzip, 2 MiB":    {Method: "gzip", BlockSize: 2 * mib, Size: 12 * mib, Quantity: "2Mi"},
		"lz4, 2 MiB":     {Method: "lz4", BlockSize: 2 * mib, Size: 12 * mib},
		"lz4, 16 MiB":    {Method: "lz4", BlockSize: 16 * mib, Size: 48 * mib},
		"none, 16 MiB":   {Method: "none", BlockSize: 16 * mib, Size: 32 * mib, Quantity: "16Mi"},
		"before 1.5":     {BlockSize: 2 * mib, Size: 12 * mib, Quantity: "-"},
		"size 0":         {Method: "lz4", BlockSize: 2 * mib, Size: 12 * mib, Quantity: "0"},
		"short at end":   {Method: "gzip", BlockSize: 16 * mib, Size: 19 * mib},
		"without blocks": {Method: "gzip", BlockSize: 2 * mib, Size: 12 * mib, Blocks: map[int64][]byte{}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			b.Volume, b.Name = "pvc-1", "backup-1"
			want := make([]byte, b.Size)
			if b.Blocks == nil {
				b.Blocks = map[int64][]byte{}
				last := (b.Size - 1) / b.BlockSize * b.BlockSize
				for i, off := range []int64{0, last} {
					block := content(byte(i), int(min(b.BlockSize, b.Size-off)))
					b.Blocks[off] = block
					copy(want[off:], block)
				}
				if b.BlockSize < last {
					b.Blocks[b.BlockSize] = make([]byte, b.BlockSize)
				}
			}
			longhorntest.AddBackup(t, s, b)
			if b.Method == "lz4" {
				must(t, s.Put(t.Context(), longhorntest.BlockName(longhorntest.VolumeFolder(b.Volume)+"blocks/", b.Blocks[0]),
					longhorntest.Compress(t, "gzip", b.Blocks[0])))
			}
			l := New(s, Options{Cache: t.TempDir()})
			names, err := l.ListBackups(t.Context())
			if n := (Name{"pvc-1", "backup-1"}); err != nil || !slices.Equal(names, []Name{n}) {
				t.Fatalf("the list has %v, %v", names, err)
			}
			o, err := l.OpenBackup(t.Context(), names[0], nil)
			must(t, err)
			defer o.Close()
			sink := &memory{bytes: make([]byte, o.Size())}
			must(t, o.Restore(t.Context(), sink))
			if !bytes.Equal(sink.bytes, want) || !sink.synced {
				t.Error("the restore has other bytes")
			}
			if done, total := o.Restored(); done != total || total == 0 && len(b.Blocks) > 0 {
				t.Errorf("%d of %d bytes are reported", done, total)
			}
			testSource(t, o, want)
		})
	}
}

// testSource compares the chunks of a source, as several goroutines read them.
func testSource(t *testing.T, o *Opened, want []byte) {
	var group errgroup.Group
	group.SetLimit(8)
	for c := range (o.Size() + block.ChunkSize - 1) / block.ChunkSize {
		group.Go(func() error {
			off := c * block.ChunkSize
			p := make([]byte, min(block.ChunkSize, o.Size()-off))
			if n, err := o.ReadAt(p, off); n != len(p) || err != nil || !bytes.Equal(p, want[off:off+int64(n)]) {
				return fmt.Errorf("chunk %d: %d bytes, %w, or other bytes", c, n, err)
			}
			return nil
		})
	}
	must(t, group.Wait())
	if n, err := o.ReadAt(make([]byte, 10), o.Size()-4); n != 4 || err != io.EOF { //nolint:errorlint // bare
		t.Errorf("a read beyond the end: %d bytes, %v", n, err)
	}
	for off := int64(0); off < o.Size(); {
		e, err := o.Next(off)
		must(t, err)
		if e.Off != off || e.Len <= 0 || e.End() > o.Size() {
			t.Fatalf("extent %+v at %d", e, off)
		}
		if e.Kind == block.Hole && !bytes.Equal(want[off:e.End()], make([]byte, e.Len)) {
			t.Errorf("the hole %+v has data", e)
		}
		off = e.End()
	}
}

// TestFilesOfLonghornAreRead: files that Longhorn wrote.
func TestFilesOfLonghornAreRead(t *testing.T) {
	s := newStore(t)
	put := func(from, name string) {
		b, err := os.ReadFile(filepath.Join("testdata", from))
		must(t, err)
		must(t, s.Put(t.Context(), name, b))
	}
	const volume, sum = "pvc-gzip-2", "08c4d3aacdd9218bb857bb0d861d45e7a138ec88a699b08df2e6bb749f071fb8"
	const at = "08/c4/" + sum + ".blk"
	n := Name{volume, "backup-0000000000000002"}
	put("volume.cfg", "backupstore/volumes/33/82/pvc-gzip-2/volume.cfg")
	put("backup_backup-0000000000000002.cfg", longhorntest.CfgName(volume, n.Backup))
	put("backing-image.cfg", "backupstore/backing-images/backing-images/debian/backing-image.cfg")
	l := New(s, Options{Cache: t.TempDir()})
	names, err := l.ListBackups(t.Context())
	if err != nil || !slices.Equal(names, []Name{n}) {
		t.Errorf("backups %v, %v", names, err)
	}
	b, err := l.ReadBackup(t.Context(), n)
	if err != nil || b.Snapshot != "snap2" || !b.Incremental || b.Uploaded != 6728 || b.Labels["RecurringJob"] != "daily" ||
		b.Created.Format(time.RFC3339) != "2026-11-25T15:01:19Z" || b.blockSize != 2*mib {
		t.Errorf("backup %+v, %v", b, err)
	}
	img, err := l.ReadImage(t.Context(), "debian")
	if err != nil || img.Size != 5243392 || !strings.HasPrefix(img.Checksum, "08f9bac4") || img.Encrypted {
		t.Errorf("image %+v, %v", img, err)
	}
	o, err := l.OpenBackup(t.Context(), n, nil)
	must(t, err)
	defer o.Close()
	if o.Size() != 64*mib || o.blocks.bytes != 23*2*mib {
		t.Errorf("%d bytes, %d in blocks", o.Size(), o.blocks.bytes)
	}
	var both [2][]byte
	for i, from := range []string{"gzip.blk", "lz4.blk"} {
		put(from, volumeFolder(volume)+"blocks/"+at)
		both[i] = make([]byte, 2*mib)
		must(t, readBlock(t.Context(), s, o.pool, sum, "gzip", both[i]))
	}
	if !bytes.Equal(both[0], both[1]) {
		t.Error("the two compressions of a block differ")
	}
}

// TestImagesAreRead: an image has a short block at the end. An image in progress is not opened.
func TestImagesAreRead(t *testing.T) {
	s := newStore(t)
	want := content(1, 5*mib+512)
	longhorntest.AddImage(t, s, longhorntest.Image{Name: "debian", Content: want, Method: "lz4", Secret: "keys"})
	longhorntest.AddImage(t, s, longhorntest.Image{Name: "half", Content: want, Method: "lz4", InProgress: true})
	l := New(s, Options{Cache: t.TempDir()})
	names, err := l.ListImages(t.Context())
	if err != nil || !slices.Equal(names, []string{"debian", "half"}) {
		t.Errorf("images %v, %v", names, err)
	}
	img, err := l.ReadImage(t.Context(), "debian")
	if err != nil || !img.Encrypted || img.Size != int64(len(want)) {
		t.Errorf("image %+v, %v", img, err)
	}
	o, err := l.OpenImage(t.Context(), "debian")
	must(t, err)
	defer o.Close()
	sink := &memory{bytes: make([]byte, o.Size())}
	must(t, o.Restore(t.Context(), sink))
	if !bytes.Equal(sink.bytes, want) {
		t.Error("the image has other bytes")
	}
	if _, err := l.OpenImage(t.Context(), "half"); !api.Is(err, api.Busy) {
		t.Errorf("an image in progress: %v", err)
	}
}

// TestLostAndDamagedBlocksAreNamed: the error has the backup, the block and the offset.
func TestLostAndDamagedBlocksAreNamed(t *testing.T) {
	plain := content(1, 2*mib)
	for name, damage := range map[string]func(packed []byte) []byte{
		"lost":          func([]byte) []byte { return nil },
		"cut":           func(b []byte) []byte { return b[:len(b)-9] },
		"flipped":       func(b []byte) []byte { b = bytes.Clone(b); b[len(b)/2] ^= 1; return b },
		"other block":   func([]byte) []byte { return longhorntest.Compress(t, "lz4", content(2, 2*mib)) },
		"empty":         func([]byte) []byte { return []byte{} },
		"bomb":          func([]byte) []byte { return longhorntest.Compress(t, "gzip", make([]byte, 20*mib)) },
		"lz4 bomb":      func([]byte) []byte { return longhorntest.Compress(t, "lz4", make([]byte, 20*mib)) },
		"large object":  func([]byte) []byte { return make([]byte, 4*mib) },
		"longer by one": func([]byte) []byte { return longhorntest.Compress(t, "lz4", append(bytes.Clone(plain), 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: 12 * mib,
				BlockSize: 2 * mib, Method: "lz4", Blocks: map[int64][]byte{4 * mib: plain}})
			object := longhorntest.BlockName(longhorntest.VolumeFolder("pvc-1")+"blocks/", plain)
			if body := damage(longhorntest.Compress(t, "lz4", plain)); body == nil {
				must(t, s.Delete(t.Context(), object))
			} else {
				must(t, s.Put(t.Context(), object, body))
			}
			o, err := New(s, Options{Cache: t.TempDir()}).OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, nil)
			must(t, err)
			defer o.Close()
			err = o.Restore(t.Context(), &memory{bytes: make([]byte, o.Size())})
			if !api.Is(err, api.Corrupt) {
				t.Fatalf("%v, want an error of kind corrupt", err)
			}
			for _, part := range []string{"backup-1", "pvc-1", longhorntest.Sum(plain)[:16], "offset 4194304"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%v: does not name %s", err, part)
				}
			}
			if _, again := o.ReadAt(make([]byte, mib), 4*mib); !api.Is(again, api.Corrupt) {
				t.Errorf("a read of a part: %v", again)
			}
		})
	}
}

// TestHostileFilesAreRefused: each change of a good cfg is refused, and a backup in progress is no backup yet.
func TestHostileFilesAreRefused(t *testing.T) {
	sum := strings.Repeat("ab", 32)
	entry := func(off int64, sum string) string { return fmt.Sprintf(`{"Offset":%d,"BlockChecksum":%q}`, off, sum) }
	for name, c := range map[string]struct {
		old, new string
		kind     api.Kind
	}{
		"in progress":       {`"CreatedTime":"2026-01-02T03:05:00Z"`, `"CreatedTime":""`, api.Busy},
		"no time":           {`"CreatedTime":"2026-01-02T03:05:00Z"`, `"CreatedTime":"soon"`, api.Corrupt},
		"other name":        {`"Name":"backup-1"`, `"Name":"backup-2"`, api.Corrupt},
		"other volume":      {`"VolumeName":"pvc-1"`, `"VolumeName":"../../x"`, api.Corrupt},
		"single file":       {`"FilePath":""`, `"FilePath":"/a"`, api.Unsupported},
		"huge blocks":       {`"backup-block-size":"2097152"`, `"backup-block-size":"99999999999"`, api.Unsupported},
		"small blocks":      {`"backup-block-size":"2097152"`, `"backup-block-size":"4096"`, api.Unsupported},
		"odd blocks":        {`"backup-block-size":"2097152"`, `"backup-block-size":"6Mi"`, api.Unsupported},
		"exponent":          {`"backup-block-size":"2097152"`, `"backup-block-size":"1e999999999"`, api.Unsupported},
		"past the end":      {"LIST", entry(12*mib, sum), api.Corrupt},
		"far past the end":  {"LIST", entry(1<<62, sum), api.Corrupt},
		"negative offset":   {"LIST", entry(-2*mib, sum), api.Corrupt},
		"odd offset":        {"LIST", entry(4096, sum), api.Corrupt},
		"overlap":           {"LIST", entry(0, sum) + "," + entry(0, sum), api.Corrupt},
		"path for a sum":    {"LIST", entry(0, "../../../../etc/passwd"), api.Corrupt},
		"capital sum":       {"LIST", entry(0, strings.ToUpper(sum)), api.Corrupt},
		"long sum":          {"LIST", entry(0, sum+"00"), api.Corrupt},
		"text for offset":   {"LIST", `{"Offset":"0"}`, api.Corrupt},
		"deep":              {"LIST", strings.Repeat("[", 1<<16), api.Corrupt},
		"deep elsewhere":    {`"ProcessingBlocks":null`, `"X":` + strings.Repeat(`{"a":`, 1000), api.Corrupt},
		"key twice":         {`"ProcessingBlocks":null`, `"Name":"backup-1"`, api.Corrupt},
		"large value":       {`"ProcessingBlocks":null`, `"X":"` + strings.Repeat("a", 2*mib) + `"`, api.Corrupt},
		"large entry":       {"LIST", `{"X":"` + strings.Repeat("a", 2*mib) + `"}`, api.Corrupt},
		"bytes behind":      {`"SingleFile":{"FilePath":""}}`, `"SingleFile":{"FilePath":""}}{}`, api.Corrupt},
		"cut":               {`"SingleFile":{"FilePath":""}}`, ``, api.Corrupt},
		"blocks come first": {`{"Name":`, `{"Blocks":[],"Parameters":{"backup-block-size":"16Mi"},"Name":`, api.Corrupt},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: 12 * mib,
				BlockSize: 2 * mib, Method: "lz4", Blocks: map[int64][]byte{2 * mib: content(1, 2*mib)}})
			object := longhorntest.CfgName("pvc-1", "backup-1")
			good, err := s.Get(t.Context(), object, 0, -1)
			must(t, err)
			i := bytes.Index(good, []byte(`"Blocks":[`))
			j := bytes.IndexByte(good, ']')
			text := string(good[:i]) + `"Blocks":[LIST]` + string(good[j+1:])
			bad := strings.ReplaceAll(strings.Replace(text, c.old, c.new, 1), "LIST", entry(2*mib, sum))
			if bad == strings.ReplaceAll(text, "LIST", entry(2*mib, sum)) {
				t.Fatal("the cfg did not change")
			}
			must(t, s.Put(t.Context(), object, []byte(bad)))
			cache := t.TempDir()
			_, err = New(s, Options{Cache: cache}).OpenBackup(t.Context(), Name{"pvc-1", "backup-1"}, nil)
			if !api.Is(err, c.kind) || !strings.Contains(err.Error(), "backup-1") {
				t.Errorf("%v: %v, want kind %v and the name", api.KindOf(err), err, c.kind)
			}
			if left, _ := os.ReadDir(cache); len(left) > 0 {
				t.Errorf("files stay in the cache: %v", left)
			}
		})
	}
}

// TestHostileNamesAreNotAsked: a list has only names that Longhorn can have, in their places.
func TestHostileNamesAreNotAsked(t *testing.T) {
	s := newStore(t)
	for _, name := range []string{
		"backupstore/volumes/aa/bb/pvc-1/backups/backup_b.cfg", // in another volume's place
		longhorntest.VolumeFolder("pvc-1") + "backups/backup_-a.cfg",
		longhorntest.VolumeFolder("pvc-1") + "backups/backup_.cfg",
		longhorntest.VolumeFolder("pvc-1") + "backups/other.cfg",
		longhorntest.VolumeFolder("pvc-1") + "backups/backup_deep/backup_b.cfg",
		longhorntest.VolumeFolder("-x") + "backups/backup_b.cfg",
		"backupstore/volumes/x.cfg",
		"backupstore/backing-images/backing-images/-a/backing-image.cfg",
	} {
		must(t, s.Put(t.Context(), name, []byte("{}")))
	}
	l := New(s, Options{Cache: t.TempDir()})
	backups, err := l.ListBackups(t.Context())
	images, imagesErr := l.ListImages(t.Context())
	if err != nil || imagesErr != nil || len(backups) > 0 || len(images) > 0 {
		t.Errorf("backups %v, images %v, %v, %v", backups, images, err, imagesErr)
	}
	_, err = l.ReadBackup(t.Context(), Name{"../x", "b"})
	if _, e := l.OpenBackup(t.Context(), Name{"x/y", "b"}, nil); !api.Is(e, api.Invalid) || !api.Is(err, api.Invalid) {
		t.Errorf("bad names: %v, %v", e, err)
	}
	if _, err := l.OpenImage(t.Context(), ".."); !api.Is(err, api.Invalid) {
		t.Errorf("a bad name of an image: %v", err)
	}
}

// TestADescriptionNeedsNoList: the description is read without the list of blocks, which may have gigabytes.
func TestADescriptionNeedsNoList(t *testing.T) {
	s := newStore(t)
	longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: 12 * mib,
		BlockSize: 2 * mib, Method: "lz4", Blocks: map[int64][]byte{0: content(1, 2*mib)}})
	object := longhorntest.CfgName("pvc-1", "backup-1")
	good, err := s.Get(t.Context(), object, 0, -1)
	must(t, err)
	i := bytes.Index(good, []byte(`"Blocks":[`)) + len(`"Blocks":[`)
	must(t, s.Put(t.Context(), object, slices.Concat(good[:i], bytes.Repeat([]byte{'x'}, 20*mib))))
	b, err := New(s, Options{Cache: t.TempDir()}).ReadBackup(t.Context(), Name{"pvc-1", "backup-1"})
	if err != nil || b.Snapshot != "snap-of-backup-1" || b.Uploaded != 12345 {
		t.Errorf("%+v, %v", b, err)
	}
}

// TestRestoreEndsWithItsContexts: the end of the caller's context and of the open backup's context end a restore, and an
// error of the sink is the restore's error.
func TestRestoreEndsWithItsContexts(t *testing.T) {
	s := newStore(t)
	longhorntest.AddBackup(t, s, longhorntest.Backup{Volume: "pvc-1", Name: "backup-1", Size: 12 * mib,
		BlockSize: 2 * mib, Method: "none", Blocks: map[int64][]byte{0: content(1, 2*mib)}})
	session, end := context.WithCancelCause(t.Context())
	o, err := New(s, Options{Cache: t.TempDir()}).OpenBackup(session, Name{"pvc-1", "backup-1"}, nil)
	must(t, err)
	defer o.Close()
	full := errors.New("the disk is full")
	if err := o.Restore(t.Context(), &memory{full: full}); !errors.Is(err, full) {
		t.Errorf("a sink without room: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	sink := &memory{bytes: make([]byte, 12*mib)}
	if err := o.Restore(ctx, sink); !errors.Is(err, context.Canceled) || sink.synced {
		t.Errorf("a caller that left: %v", err)
	}
	lost := errors.New("the session is lost")
	end(lost)
	if err := o.Restore(t.Context(), sink); !errors.Is(err, lost) || sink.synced {
		t.Errorf("a lost session: %v", err)
	}
}

// FuzzFiles: no cfg makes the reader panic, or return a backup that breaks its promises.
func FuzzFiles(f *testing.F) {
	for _, name := range []string{"backup_backup-0000000000000002.cfg", "volume.cfg", "backing-image.cfg"} {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		must(f, err)
		f.Add(b)
	}
	f.Add([]byte(`{"Name":"n","VolumeName":"v","CreatedTime":"2026-01-02T03:05:00Z","Blocks":[{"Offset":0}]}`))
	f.Fuzz(func(t *testing.T, cfg []byte) {
		s := &oneObject{body: cfg}
		l := New(s, Options{Cache: t.TempDir()})
		var named struct{ Name, VolumeName string }
		_ = json.Unmarshal(cfg, &named)
		if v, err := l.ReadVolume(t.Context(), named.Name); err == nil && (v.Size <= 0 || v.Size > api.MaxVolumeSize) {
			t.Errorf("volume %+v", v)
		}
		n := Name{named.VolumeName, named.Name}
		if b, err := l.ReadBackup(t.Context(), n); err == nil && (b.Name != n || b.Created.IsZero() || b.Uploaded < 0) {
			t.Errorf("backup %+v", b)
		}
		o, err := l.OpenImage(t.Context(), named.Name)
		if err != nil {
			return
		}
		defer o.Close()
		for off := int64(0); off < o.Size(); {
			e, err := o.Next(off)
			must(t, err)
			if e.Off != off || e.Len <= 0 || e.End() > o.Size() {
				t.Fatalf("extent %+v of %d", e, o.Size())
			}
			off = e.End()
		}
	})
}

// oneObject is a store whose every name is the same object.
type oneObject struct {
	target.Store
	body []byte
}

func (s *oneObject) Stat(_ context.Context, name string) (target.Object, error) {
	return target.Object{Name: name, Size: int64(len(s.body))}, nil
}

func (s *oneObject) Get(_ context.Context, _ string, off, n int64) ([]byte, error) {
	return bytes.Clone(s.body[off : off+n]), nil
}
