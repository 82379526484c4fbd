package format

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// The version of all formats. A program refuses files of every other version: it must not rewrite an unknown file, and
// collects nothing while such a file is on the disk.
const (
	version = 1
	maxMeta = 16 << 20
)

// envelope is the content of every metadata file: one JSON object, with a checksum over the body in its compact form.
type envelope struct {
	Format  string          `json:"format"`
	Version int             `json:"version"`
	SHA256  string          `json:"sha256"`
	Body    json.RawMessage `json:"body"`
}

// EncodeMeta encodes a metadata file of a format.
func EncodeMeta(format string, body any) ([]byte, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(raw)
	out, err := json.MarshalIndent(envelope{format, version, hex.EncodeToString(sum[:]), raw}, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(out, '\n'), nil
}

// DecodeMeta decodes a metadata file of a format into body. Unknown fields are an error.
func DecodeMeta(data []byte, format string, body any) error {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return api.Errorf(api.Corrupt, "not a metadata file: %w", err)
	}
	if e.Format != format {
		return api.Errorf(api.Corrupt, "format is %q, not %q", e.Format, format)
	}
	if e.Version != version {
		return api.Errorf(api.Unsupported, "format %s version %d: this program reads version %d; use the program that "+
			"wrote the file",
			format, e.Version, version)
	}
	var raw bytes.Buffer
	if err := json.Compact(&raw, e.Body); err != nil {
		return api.Errorf(api.Corrupt, "body: %w", err)
	}
	sum := sha256.Sum256(raw.Bytes())
	if hex.EncodeToString(sum[:]) != e.SHA256 {
		return api.Errorf(api.Corrupt, "checksum of the body does not match")
	}
	d := json.NewDecoder(&raw)
	d.DisallowUnknownFields()
	if err := d.Decode(body); err != nil {
		return api.Errorf(api.Corrupt, "body: %w", err)
	}
	return nil
}

// ReadMeta reads a metadata file into body. The error for a missing file wraps fs.ErrNotExist.
func ReadMeta(fsys file.FS, name, format string, body any) error {
	h, err := fsys.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer h.Close()
	data, err := io.ReadAll(io.NewSectionReader(h, 0, maxMeta+1))
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if len(data) > maxMeta {
		return api.Errorf(api.Corrupt, "%s is larger than %d bytes", name, maxMeta)
	}
	if err := DecodeMeta(data, format, body); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// WriteMeta replaces a metadata file atomically: the rename is the commit point, and is durable on return.
func WriteMeta(fsys file.FS, name, format string, body any) error {
	data, err := EncodeMeta(format, body)
	if err != nil {
		return err
	}
	return ReplaceFile(fsys, name, data)
}

// ErrUnsure marks the error of a replaced file where the disk may have the old or the new content.
var ErrUnsure = errors.New("the disk may have the old or the new content of the file")

// ReplaceFile replaces a file atomically. An error that wraps ErrUnsure leaves open which content the disk has.
func ReplaceFile(fsys file.FS, name string, data []byte) error {
	tmp := name + ".tmp"
	if err := WriteFile(fsys, tmp, data); err != nil {
		return err
	}
	if err := fsys.Rename(tmp, name); err != nil {
		return err
	}
	if err := fsys.SyncDir(filepath.Dir(name)); err != nil {
		return fmt.Errorf("%w: %w", ErrUnsure, err)
	}
	return nil
}

// WriteFile makes a file with durable content; the name becomes durable with a sync of the folder.
func WriteFile(fsys file.FS, name string, data []byte) error {
	h, err := fsys.Open(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err := h.WriteAt(data, 0); err != nil {
		return errors.Join(err, h.Close())
	}
	if err := h.Datasync(); err != nil {
		return errors.Join(err, h.Close())
	}
	return h.Close()
}
