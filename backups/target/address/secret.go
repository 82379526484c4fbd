package address

import (
	"net/url"
	"slices"
	"strings"
	"unicode"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/s3"
	"drover.io/drover/backups/target/share"
)

// secretRoleARN is Longhorn's key for credentials of a role, which Drover cannot use yet.
const secretRoleARN = "AWS_IAM_ROLE_ARN"

// Password is the password of the repository. own is false if everybody knows the password. Errors are of kind Invalid.
func Password(secret map[string][]byte) (password string, own bool, err error) {
	backup, restic := value(secret, api.SecretBackupPassword), value(secret, api.SecretResticPassword)
	switch {
	case backup != "" && restic != "" && backup != restic:
		return "", false, api.Errorf(api.Invalid, "Secret of the backup target: %s and %s differ; remove one of them",
			api.SecretBackupPassword, api.SecretResticPassword)
	case backup != "":
		password = backup
	case restic != "":
		password = restic
	default:
		password = api.PublishedPassword
	}
	return password, password != api.PublishedPassword, nil
}

// value is the value of a key without line ends, which editors and tools leave at the end.
func value(secret map[string][]byte, key string) string {
	return strings.TrimRight(string(secret[key]), "\r\n")
}

// refuseControl refuses values of the keys with control characters.
func refuseControl(secret map[string][]byte, keys ...string) error {
	for _, key := range keys {
		if strings.ContainsFunc(value(secret, key), unicode.IsControl) {
			return api.Errorf(api.Invalid, "Secret of the backup target: %s has a control character; remove it", key)
		}
	}
	return nil
}

// shareLogin are the credentials of an SMB share. NFS has none.
func (a Address) shareLogin(secret map[string][]byte) (share.Credentials, error) {
	if !a.share.Is(share.CIFS) {
		return share.Credentials{}, nil
	}
	login := share.Credentials{User: value(secret, api.SecretCIFSUser), Password: value(secret, api.SecretCIFSPassword)}
	if login.User == "" && login.Password != "" {
		return share.Credentials{}, api.Errorf(api.Invalid, "Secret of the backup target: %s is missing; give %s and %s",
			api.SecretCIFSUser, api.SecretCIFSUser, api.SecretCIFSPassword)
	}
	return login, refuseControl(secret, api.SecretCIFSUser, api.SecretCIFSPassword)
}

// bucketConfig is the configuration of an S3 store.
func (a Address) bucketConfig(secret map[string][]byte) (s3.Config, error) {
	if value(secret, secretRoleARN) != "" {
		return s3.Config{}, api.Errorf(api.Unsupported, "Secret of the backup target: %s is not supported yet; remove the "+
			"key and give %s and %s", secretRoleARN, api.SecretAccessKey, api.SecretSecretKey)
	}
	for _, key := range []string{api.SecretAccessKey, api.SecretSecretKey} {
		if value(secret, key) == "" {
			return s3.Config{}, api.Errorf(api.Invalid, "Secret of the backup target: %s is missing; give %s and %s", key,
				api.SecretAccessKey, api.SecretSecretKey)
		}
	}
	if err := refuseControl(secret, api.SecretAccessKey, api.SecretSecretKey, api.SecretSessionToken, api.SecretEndpoints,
		api.SecretNoProxy); err != nil {
		return s3.Config{}, err
	}
	config := s3.Config{
		Endpoint:     value(secret, api.SecretEndpoints),
		Region:       a.region,
		Bucket:       a.bucket,
		Prefix:       a.prefix,
		AccessKey:    s3.Secret(value(secret, api.SecretAccessKey)),
		SecretKey:    s3.Secret(value(secret, api.SecretSecretKey)),
		SessionToken: s3.Secret(value(secret, api.SecretSessionToken)),
		CA:           secret[api.SecretCert],
		NoProxy:      value(secret, api.SecretNoProxy),
	}
	switch {
	case value(secret, api.SecretVirtualHost) == "true":
		config.Addressing = s3.VirtualHosted
	case config.Endpoint != "":
		config.Addressing = s3.Path
	}
	var err error
	if config.HTTPProxy, err = proxy(secret, api.SecretHTTPProxy); err != nil {
		return s3.Config{}, err
	}
	config.HTTPSProxy, err = proxy(secret, api.SecretHTTPSProxy)
	return config, err
}

// proxy is the URL of a proxy. As in the environment variables, http:// may be missing.
func proxy(secret map[string][]byte, key string) (s3.Secret, error) {
	text := value(secret, key)
	if text != "" && !strings.Contains(text, "://") {
		text = "http://" + text
	}
	u, err := url.Parse(text)
	if text != "" && (err != nil || u.Host == "" ||
		!slices.Contains([]string{"http", "https", "socks5", "socks5h"}, u.Scheme)) {
		return "", api.Errorf(api.Invalid, "Secret of the backup target: %s is not a URL of a proxy; write "+
			"http://HOST:PORT", key)
	}
	return s3.Secret(text), nil
}
