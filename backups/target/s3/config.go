package s3

import (
	"net/url"
	"strings"

	"github.com/minio/minio-go/v7"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/web"
)

// Addressing says where a request names the bucket.
type Addressing int

// The ways to name the bucket.
const (
	Auto          Addressing = iota // VirtualHosted for the large public clouds, else Path
	Path                            // https://host/bucket/object
	VirtualHosted                   // https://bucket.host/object
)

func (a Addressing) lookup() minio.BucketLookupType {
	return map[Addressing]minio.BucketLookupType{
		Path: minio.BucketLookupPath, VirtualHosted: minio.BucketLookupDNS,
	}[a]
}

// Config says where a store is. The package never reads the environment, other than the library for a Role.
type Config struct {
	Endpoint   string // URL of the server, such as https://minio.example:9000; empty: Amazon's
	Region     string // empty: the server tells the region
	Bucket     string
	Prefix     string // of all objects, without slashes at the ends; empty: the whole bucket
	Addressing Addressing

	AccessKey, SecretKey, SessionToken web.Secret

	// Role gives credentials in place of the keys.
	Role *Role

	web.Network
}

// endpoint is the host of the server, and whether the store uses TLS.
func (c Config) endpoint() (host string, secure bool, err error) {
	if c.Endpoint == "" {
		return "s3.amazonaws.com", true, nil
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" ||
		u.Scheme != "http" && u.Scheme != "https" {
		return "", false, api.Errorf(api.Invalid, "S3 endpoint of bucket %s: not a URL like https://host:port without user "+
			"and path", c.Bucket)
	}
	return u.Host, u.Scheme == "https", nil
}
