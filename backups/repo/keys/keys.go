// Package keys owns key files: each wraps the master key of a repository with one password, so that several passwords
// open one repository. restic's design document ("Keys, Encryption and MAC") has the format: JSON with the parameters
// of scrypt, the salt, and the sealed master key.
//
// Invariants: a key file is hostile until it opened: parameters of scrypt are bounded before any work. No error and no
// file has a password or a key in plain.
//
// The package starts no goroutine and has no lock.
package keys

import (
	"crypto/rand"
	"encoding/json"
	"math/bits"
	"time"

	"golang.org/x/crypto/scrypt"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// Bounds of a key file. restic and rustic write at most 128 MiB of memory.
const (
	FileLimit   = 64 << 10
	saltSize    = 64
	largestN    = 1 << 20
	largestR    = 64
	largestP    = 64
	memoryLimit = 256 << 20 // 128*N*r bytes
	workLimit   = 2 << 30   // 128*N*r*p bytes: some seconds
)

// file is the JSON of a key file.
type file struct {
	Hostname string    `json:"hostname"`
	Username string    `json:"username"`
	KDF      string    `json:"kdf"`
	N        int       `json:"N"`
	R        int       `json:"r"`
	P        int       `json:"p"`
	Created  time.Time `json:"created"`
	Data     []byte    `json:"data"`
	Salt     []byte    `json:"salt"`
}

// master is the JSON of a master key.
type master struct {
	MAC struct {
		K []byte `json:"k"`
		R []byte `json:"r"`
	} `json:"mac"`
	Encrypt []byte `json:"encrypt"`
}

// Wrap makes a key file that opens with password.
func Wrap(secret blob.Secret, password, hostname, username string) ([]byte, error) {
	f := file{Hostname: hostname, Username: username, KDF: "scrypt", N: 32768, R: 8, P: 1, Created: time.Now(),
		Salt: make([]byte, saltSize)}
	_, _ = rand.Read(f.Salt) // never fails
	key, err := f.derive(password)
	if err != nil {
		return nil, err
	}
	m := master{Encrypt: secret.Encrypt[:]}
	m.MAC.K, m.MAC.R = secret.MACKey[:], secret.MACMask[:]
	plain, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	f.Data = key.Seal(nil, plain)
	return json.Marshal(f)
}

// Unwrap opens a key file. A password that does not open the file is an error of kind Denied, a damaged file one of
// kind Corrupt.
func Unwrap(content []byte, password string) (secret blob.Secret, err error) {
	if len(content) > FileLimit {
		return secret, api.Errorf(api.Corrupt, "key file has %d bytes, at most %d are allowed", len(content), FileLimit)
	}
	var f file
	if err := json.Unmarshal(content, &f); err != nil {
		return secret, api.Errorf(api.Corrupt, "key file is damaged: %w", err)
	}
	key, err := f.derive(password)
	if err != nil {
		return secret, err
	}
	plain, err := key.Open(f.Data)
	if err != nil {
		return secret, api.Errorf(api.Denied, "key file does not open with this password")
	}
	return parseMaster(plain)
}

func parseMaster(plain []byte) (secret blob.Secret, err error) {
	var m master
	if json.Unmarshal(plain, &m) != nil { // the cause could quote the key
		return secret, api.Errorf(api.Corrupt, "key file opens, but the master key in it is no JSON of a key")
	}
	for _, part := range []struct{ to, from []byte }{
		{secret.Encrypt[:], m.Encrypt}, {secret.MACKey[:], m.MAC.K}, {secret.MACMask[:], m.MAC.R},
	} {
		if copy(part.to, part.from) != len(part.to) || len(part.from) != len(part.to) {
			return blob.Secret{}, api.Errorf(api.Corrupt,
				"key file opens, but a part of the master key has %d bytes instead of %d", len(part.from), len(part.to))
		}
	}
	return secret, nil
}

// derive computes the key that seals the master key.
func (f *file) derive(password string) (*blob.Key, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	derived, err := scrypt.Key([]byte(password), f.Salt, f.N, f.R, f.P, 64)
	if err != nil {
		return nil, api.Errorf(api.Corrupt, "key file has parameters that scrypt refuses: %w", err)
	}
	var s blob.Secret
	copy(s.Encrypt[:], derived[:32])
	copy(s.MACKey[:], derived[32:48])
	copy(s.MACMask[:], derived[48:])
	return blob.NewKey(s), nil
}

func (f *file) check() error {
	switch {
	case f.KDF != "scrypt":
		return api.Errorf(api.Unsupported, "key file has an unknown key derivation; only scrypt is supported")
	case f.N < 2 || f.N > largestN || bits.OnesCount(uint(f.N)) != 1, f.R < 1 || f.R > largestR, f.P < 1 || f.P > largestP,
		128*f.N*f.R > memoryLimit, 128*f.N*f.R*f.P > workLimit:
		return api.Errorf(api.Corrupt, "key file asks for scrypt with N %d, r %d, p %d; at most %d MiB of memory are allowed",
			f.N, f.R, f.P, memoryLimit>>20)
	case len(f.Salt) == 0:
		return api.Errorf(api.Corrupt, "key file has no salt")
	}
	return nil
}
