// Package longhorntest writes backups and images as Longhorn writes them. Only tests import the package.
package longhorntest

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	"github.com/pierrec/lz4/v4"

	"drover.io/drover/backups/target"
)

// Backup is a backup of a volume, with the fields and the order of Longhorn's cfg.
type Backup struct {
	Volume, Name string
	Size         int64 // of the volume
	Image        string
	ImageSum     string // SHA-512 of the image
	BlockSize    int64
	// Quantity is the text of the size of blocks, if not a plain number; "-" leaves the parameter out.
	Quantity   string
	Method     string // none, gzip or lz4; empty: gzip, and the cfg names no method
	Blocks     map[int64][]byte
	Labels     map[string]string
	InProgress bool
	Day        int // of January 2026; 0: the second
}

// Image is a backing image.
type Image struct {
	Name       string
	Content    []byte
	Method     string
	InProgress bool
	Secret     string
	Sparse     bool // blocks of zeros are left out
}

type entry struct {
	Offset        int64
	BlockChecksum string
}

// Sum is the name of a block.
func Sum(b []byte) string {
	sum := sha512.Sum512(b)
	return hex.EncodeToString(sum[:32])
}

// VolumeFolder is the folder of a volume.
func VolumeFolder(volume string) string {
	sum := Sum([]byte(volume))
	return fmt.Sprintf("backupstore/volumes/%s/%s/%s/", sum[:2], sum[2:4], volume)
}

// BlockName is the name of a block's object in a folder of blocks.
func BlockName(folder string, plain []byte) string {
	sum := Sum(plain)
	return fmt.Sprintf("%s%s/%s/%s.blk", folder, sum[:2], sum[2:4], sum)
}

// CfgName is the name of a backup's cfg.
func CfgName(volume, backup string) string {
	return VolumeFolder(volume) + "backups/backup_" + backup + ".cfg"
}

// Compress packs a block.
func Compress(t testing.TB, method string, plain []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	var err error
	switch method {
	case "none":
		return plain
	case "lz4":
		w := lz4.NewWriter(&b)
		_, err = w.Write(plain)
		err = errors.Join(err, w.Close())
	default:
		w := gzip.NewWriter(&b)
		_, err = w.Write(plain)
		err = errors.Join(err, w.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func put(t testing.TB, s target.Store, name string, body []byte) {
	t.Helper()
	if err := s.Put(t.Context(), name, body); err != nil {
		t.Fatal(err)
	}
}

func putJSON(t testing.TB, s target.Store, name string, v any) {
	t.Helper()
	body, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	put(t, s, name, body)
}

// twice is a string as volume.cfg has it.
func twice(text string) string { return strconv.Quote(text) }

func entries(t testing.TB, s target.Store, folder, method string, blocks map[int64][]byte) (list []entry) {
	t.Helper()
	for _, off := range slices.Sorted(maps.Keys(blocks)) {
		put(t, s, BlockName(folder, blocks[off]), Compress(t, method, blocks[off]))
		list = append(list, entry{off, Sum(blocks[off])})
	}
	return list
}

// AddBackup writes a backup, with the cfg of its volume.
func AddBackup(t testing.TB, s target.Store, b Backup) {
	t.Helper()
	folder := VolumeFolder(b.Volume)
	putJSON(t, s, folder+"volume.cfg", struct {
		Name, Size              string
		Labels                  map[string]string
		CreatedTime             string
		LastBackupName          string
		LastBackupAt            string
		BlockCount              string
		BackingImageName        string
		BackingImageChecksum    string
		CompressionMethod       string
		StorageClassName        string
		DataEngine              string
		AnObjectOfALaterVersion map[string][]int
	}{b.Volume, strconv.FormatInt(b.Size, 10), nil, "2026-01-02T03:00:00Z", b.Name, "2026-01-02T03:04:05Z", "1",
		twice(b.Image), twice(b.ImageSum), twice(b.Method), twice("longhorn"), twice("v1"), map[string][]int{"a": {1}}})
	parameters := map[string]string{"backup-mode": "full"}
	switch {
	case b.Quantity == "":
		parameters["backup-block-size"] = strconv.FormatInt(b.BlockSize, 10)
	case b.Quantity != "-":
		parameters["backup-block-size"] = b.Quantity
	}
	day := fmt.Sprintf("2026-01-%02dT", cmp.Or(b.Day, 2))
	created := day + "03:05:00Z"
	list := entries(t, s, folder+"blocks/", b.Method, b.Blocks)
	if b.InProgress {
		created, list = "", nil
	}
	putJSON(t, s, CfgName(b.Volume, b.Name), struct {
		Name, VolumeName, SnapshotName, SnapshotCreatedAt, CreatedTime, Size string
		Labels, Parameters                                                   map[string]string
		IsIncremental                                                        bool
		CompressionMethod                                                    string
		NewlyUploadedDataSize, ReUploadedDataSize                            string
		ProcessingBlocks                                                     map[string]string
		Blocks                                                               []entry `json:",omitempty"`
		SingleFile                                                           struct{ FilePath string }
	}{b.Name, b.Volume, "snap-of-" + b.Name, day + "03:04:05Z", created,
		strconv.FormatInt(int64(len(list))*b.BlockSize, 10), b.Labels, parameters, false, b.Method, "12345", "0", nil, list,
		struct{ FilePath string }{}})
}

// ImageSum is the SHA-512 of an image's file.
func ImageSum(content []byte) string {
	sum := sha512.Sum512(content)
	return hex.EncodeToString(sum[:])
}

// AddImage writes a backing image.
func AddImage(t testing.TB, s target.Store, i Image) {
	t.Helper()
	blocks := map[int64][]byte{}
	const size = 2 << 20
	for off := 0; off < len(i.Content); off += size {
		b := i.Content[off:min(off+size, len(i.Content))]
		if !i.Sparse || !bytes.Equal(b, make([]byte, len(b))) {
			blocks[int64(off)] = b
		}
	}
	list := entries(t, s, "backupstore/backing-images/blocks/", i.Method, blocks)
	completed := "2026-01-02T03:05:00Z"
	if i.InProgress {
		completed = ""
	}
	putJSON(t, s, "backupstore/backing-images/backing-images/"+i.Name+"/backing-image.cfg", struct {
		Name, Size, BlockCount, Checksum string
		Labels                           map[string]string
		CompressionMethod                string
		CreatedTime, CompleteTime        string
		Secret, SecretNamespace          string
		ProcessingBlocks                 map[string]map[string]string
		Blocks                           []entry
	}{i.Name, strconv.Itoa(len(i.Content)), strconv.Itoa(len(list)), ImageSum(i.Content), nil, i.Method,
		"2026-01-02T03:00:00Z", completed, i.Secret, "", map[string]map[string]string{"Blocks": {}}, list})
}
